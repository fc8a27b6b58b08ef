"""Speed on this machine: our step against the loops people write, in one run, beside the floor.

Owns the arms and the table of `oelm bench`. A time is the median of many steps after warm-up; ratios within one run are
what to trust. The floor is the step's matrix products at the rate a large product reaches here. Refuses data sets:
tokens are drawn at random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import oelm
from oelm.method.variant import as_variant
from oelm.models.build import build
from oelm.models.shapes import PRESETS, Shape
from oelm.train.objectives import objective_for
from oelm.train.optim import Optimizers
from oelm.train.parallel import World
from oelm.train.run import Optimizer
from oelm.train.step import Step, make_step


@dataclass
class Timing:
    """One arm: the median step and what it means."""

    arm: str
    batch: int
    context: int
    ms: float
    tokens_per_s: float
    peak_gib: float | None
    of_floor: float | None  # floor / time

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()


class _RandomTokens:
    """The part of a data source that an objective and a step need."""

    kind = "lm"
    name = "random tokens"

    def __init__(self, vocab: int, batch: int, context: int) -> None:
        draw = np.random.default_rng(0)
        self.batches = [
            {"inputs": t[:, :-1].copy(), "targets": t[:, 1:].copy()}
            for t in (draw.integers(0, vocab, (batch, context + 1)) for _ in range(8))
        ]

    def eval_batches(self, split: str, batch: int) -> Iterator[dict[str, Any]]:
        yield from self.batches

    def score(self, split: str, outputs: Any) -> dict[str, Any]:
        return {}


def ceilings(device: torch.device) -> dict[str, float | None]:
    """What a large matrix product (FLOP/s) and a large copy (bytes/s, read and written) reach here."""
    if device.type != "cuda":
        a = torch.randn(1024, 1024)
        seconds = _median(lambda: a @ a, 10, device)
        x = torch.empty(2**26, dtype=torch.uint8)
        copied = _median(lambda: x.clone(), 10, device)
        return {"product_flops": 2 * 1024**3 / seconds, "copy_bytes": 2 * 2**26 / copied}
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    seconds = _median(lambda: a @ b, 20, device)
    x = torch.empty(2**32, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copied = _median(lambda: y.copy_(x), 10, device)
    return {"product_flops": 2 * 8192**3 / seconds, "copy_bytes": 2 * 2**32 / copied}


def _median(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Median seconds of a call, on the device's own clock where it has one."""
    for _ in range(3):
        call()
    found = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(times)]  # type: ignore[no-untyped-call]
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        found = [start.elapsed_time(end) / 1e3 for start, end in events]
    else:
        for _ in range(times):
            begun = time.perf_counter()
            call()
            found.append(time.perf_counter() - begun)
    return float(statistics.median(found))


def step_flops(shape: Shape, batch: int) -> float:
    """Matrix products of one training step: forward once, backward twice; causal attention counted half."""
    tokens = batch * shape.context
    kv = (shape.kv_heads or shape.heads) * shape.head_dim
    block = shape.width * (2 * shape.width + 2 * kv + 2 * shape.hidden)
    attention = shape.context * shape.width * (1 if shape.causal else 2)
    return 6.0 * tokens * (shape.layers * (block + attention) + shape.width * shape.vocab)


def _ours(shape: Shape, variant: str, source: _RandomTokens, device: torch.device, plain: bool) -> Callable[[], None]:
    model = build(shape, vocab=shape.vocab, labels=None, seed=0, context=shape.context)
    oelm.apply(model, as_variant(variant), seed=0)
    model.to(device).train()
    optimizers = Optimizers(model, Optimizer(lr=1e-4), device)
    world = World(device, "ddp")
    make = Step if plain else make_step
    step = make(
        model,
        objective_for(shape, source),
        optimizers,
        device=device,
        precision="bf16" if device.type == "cuda" else "fp32",
        accumulate=1,
        clip=1.0,
        world=world,
    )
    number = 0

    def call() -> None:
        nonlocal number
        if step.full:
            step.look()
        step(number, source.batches[number % len(source.batches)], 1.0)
        number += 1

    return call


class _Loop(nn.Module):
    """GPT-512 as people write it by hand: one QKV product, SDPA, cross-entropy over all logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.embed, self.position = nn.Embedding(shape.vocab, d), nn.Embedding(shape.context, d)
        self.drop = nn.Dropout(shape.dropout)
        self.parts = nn.ModuleList(
            nn.ModuleList(
                (
                    nn.LayerNorm(d),
                    nn.Linear(d, 3 * d, bias=False),
                    nn.Linear(d, d, bias=False),
                    nn.LayerNorm(d),
                    nn.Linear(d, shape.hidden),
                    nn.Linear(shape.hidden, d),
                )
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(d)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(inputs) + self.position.weight[: inputs.shape[1]])
        for part in self.parts:
            norm1, qkv, out, norm2, up, down = cast(nn.ModuleList, part)
            q, k, v = qkv(norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
            x = x + self.drop(out(seen.transpose(1, 2).flatten(-2)))
            x = x + self.drop(down(F.gelu(up(norm2(x)))))
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _by_hand(
    model: nn.Module, loss_of: Callable[..., Any], source: _RandomTokens, device: torch.device
) -> Callable[[], None]:
    """The usual loop: autocast, backward, clip, fused AdamW."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batches = [{k: torch.from_numpy(v).to(device) for k, v in b.items()} for b in source.batches]
    number = 0

    def call() -> None:
        nonlocal number
        batch = batches[number % len(batches)]
        number += 1
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(batch["inputs"], batch["targets"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return call


def _hf(shape: Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.hidden,
        activation_function="gelu",
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _hf_loss(model: nn.Module) -> Callable[..., Any]:
    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = model(input_ids=inputs).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


ARMS = ("oelm", "oelm frozen", "oelm slices", "oelm plain", "by hand", "by hand compiled", "HF eager", "HF compiled")


def _arm(name: str, shape: Shape, source: _RandomTokens, device: torch.device) -> Callable[[], None]:
    torch._dynamo.reset()
    if name.startswith("oelm"):
        variant = {"oelm frozen": "oelm-freeze", "oelm slices": "slices-shift"}.get(name, "baseline")
        return _ours(shape, variant, source, device, plain=name == "oelm plain")
    model = _Loop(shape) if name.startswith("by hand") else _hf(shape)
    called: nn.Module = torch.compile(model) if name.endswith("compiled") else model  # type: ignore[assignment]
    return _by_hand(model, called if name.startswith("by hand") else _hf_loss(called), source, device)


def bench(
    preset: str,
    *,
    batch: int = 8,
    arms: tuple[str, ...] = ARMS,
    device: torch.device,
    steps: int = 60,
    dropout: float | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Times of every arm on one shape, with the ceilings they are measured against."""
    shape = PRESETS[preset]
    if not isinstance(shape, Shape):
        raise oelm.OelmError(f"bench: {preset!r} is a Hugging Face model; bench takes our own presets")
    if dropout is not None:
        shape = shape.changed(dropout=dropout)
    source = _RandomTokens(shape.vocab, batch, shape.context)
    limits = ceilings(device)
    product = limits["product_flops"]
    floor = step_flops(shape, batch) / product if product else None
    timings: list[Timing] = []
    for name in arms:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        call = _arm(name, shape, source, device)
        for _ in range(10 if device.type == "cuda" else 2):
            call()
        seconds = _median(call, steps, device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        tokens = batch * shape.context / seconds
        timings.append(
            Timing(name, batch, shape.context, seconds * 1e3, tokens, peak, floor / seconds if floor else None)
        )
        say(f"{name:18s} {seconds * 1e3:9.3f} ms a step, {tokens:,.0f} tokens/s")
        del call
    return {
        "preset": preset,
        "batch": batch,
        "dropout": shape.dropout,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ceilings": limits,
        "floor_ms": floor * 1e3 if floor else None,
        "timings": [t.to_dict() for t in timings],
    }


def table(found: dict[str, Any]) -> str:
    """The arms as lines: time, ratio to the first arm, tokens, memory, share of the floor."""
    floor = found["floor_ms"]
    lines = [
        f"{found['preset']}, {found['batch']} sequences a step, dropout {found['dropout']:g}, {found['device']}, torch {found['torch']}",
        f"floor {floor:.3f} ms: the step's products at {found['ceilings']['product_flops'] / 1e12:,.1f} TFLOP/s, "
        f"a large product's rate here; a large copy moves {found['ceilings']['copy_bytes'] / 1e12:.2f} TB/s",
        f"{'arm':18s} {'ms/step':>9s} {'ratio':>6s} {'tokens/s':>12s} {'GiB':>6s} {'floor/time':>10s}",
    ]
    first = found["timings"][0]["ms"]
    for one in found["timings"]:
        memory = "" if one["peak_gib"] is None else f"{one['peak_gib']:.1f}"
        lines.append(
            f"{one['arm']:18s} {one['ms']:9.3f} {one['ms'] / first:6.2f} {one['tokens_per_s']:12,.0f} "
            f"{memory:>6s} {one['of_floor']:10.0%}"
        )
    return "\n".join(lines)
