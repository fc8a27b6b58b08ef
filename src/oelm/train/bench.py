"""Speed on this machine: our step against the loops people write, in one run, beside the floor.

Owns the arms and the table of `oelm bench`. A time is the median of many steps after warm-up; ratios within one run are
what to trust. The floor is the step's matrix products at the rate a large product reaches here. Refuses data sets:
tokens and labels are drawn at random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import oelm
from oelm.method.timing import step_ceiling
from oelm.method.variant import as_variant
from oelm.models.build import build
from oelm.models.hub import load_hub
from oelm.models.shapes import HubModel, Shape
from oelm.train import peers
from oelm.train.objectives import objective_for
from oelm.train.optim import Optimizers
from oelm.train.parallel import World
from oelm.train.run import Optimizer
from oelm.train.step import Step, make_step


CURVE = 10  # losses of the first steps that are kept, to compare arms


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
    losses: Sequence[float]  # of the first steps, of arms that begin with the same weights

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Measured:
    seconds: float
    losses: Sequence[float] = ()  # of the first steps, of arms that begin with the same weights
    ceiling: Mapping[str, float] | None = None  # of what freezing can save, where the arm is frozen


class _Source:
    """The part of a data source that an objective and a step need: eight batches, drawn at random."""

    def __init__(self, spec: Shape | HubModel, vocab: int, batch: int, context: int) -> None:
        self.kind: str = spec.head
        self.name = "random tokens"
        draw = np.random.default_rng(0)
        self.batches: peers.Batches = []
        for _ in range(8):
            tokens = draw.integers(0, vocab, (batch, context + 1))
            inputs = tokens[:, :-1].copy()
            if spec.head == "lm":
                self.batches.append({"inputs": inputs, "targets": tokens[:, 1:].copy()})
            else:
                mask, labels = np.ones_like(inputs, dtype=bool), draw.integers(0, spec.labels, batch)
                self.batches.append({"inputs": inputs, "mask": mask, "types": np.zeros_like(inputs), "labels": labels})

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


def step_flops(spec: Shape | HubModel, batch: int, context: int) -> float:
    """Matrix products of one training step when everything trains; causal attention counted half."""
    if isinstance(spec, HubModel):
        flops = oelm.account(load_hub(spec).inner, length=context, batch=batch).flops
        if flops is None:
            raise oelm.OelmError(f"bench: the operations of {spec.path} cannot be counted; use one of our own presets")
        return float(flops.total)
    kv = (spec.kv_heads or spec.heads) * spec.head_dim
    block = spec.width * (2 * spec.width + 2 * kv + 2 * spec.hidden)
    attention = context * spec.width * (1 if spec.causal else 2)
    outputs = spec.width * spec.vocab if spec.head == "lm" else 0
    return 6.0 * batch * context * (spec.layers * (block + attention) + outputs)


class _Bench:
    """What the arms of one table share: the model's value, the batches, the device."""

    def __init__(
        self, spec: Shape | HubModel, batch: int, context: int, dropout: float, device: torch.device, steps: int
    ) -> None:
        self.spec, self.dropout, self.device, self.steps = spec, dropout, device, steps
        self.warm = 10 if device.type == "cuda" else 2
        self.vocab: int = spec.vocab if isinstance(spec, Shape) else load_hub(spec).config.vocab_size
        self.source = _Source(spec, self.vocab, batch, context)
        self.tokens = batch * context

    def measure(self, arm: str) -> _Measured:
        torch._dynamo.reset()
        if arm.startswith("oelm"):
            return self._ours(arm)
        compiled = arm.endswith("compiled")
        if arm.startswith("Trainer"):
            model = self._model().inner
            seconds, losses = peers.trainer(
                model, self.source.batches, self.device, steps=self.steps, warm=self.warm, compiled=compiled
            )
            return _Measured(statistics.median(seconds), losses[:CURVE])
        assert isinstance(self.spec, Shape)
        by_hand = arm.startswith("by hand")
        peer = peers.ByHand(self.spec) if by_hand else peers.hf_gpt2(self.spec)
        called: Any = torch.compile(peer) if compiled else peer
        call = peers.loop(peer, called if by_hand else peers.hf_loss(called), self.source.batches, self.device)
        return _Measured(self._seconds(call))

    def _model(self) -> Any:
        model = build(self.spec, vocab=self.vocab, seed=0)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = self.dropout
        return model

    def _ours(self, arm: str) -> _Measured:
        variant = {"oelm frozen": "oelm-freeze", "oelm slices": "slices-shift"}.get(arm, "baseline")
        model = self._model()
        oelm.apply(model, as_variant(variant), seed=0)
        model.to(self.device).train()
        step = (Step if arm == "oelm plain" else make_step)(
            model,
            objective_for(self.spec, self.source),
            Optimizers(model, Optimizer(lr=peers.RATE, weight_decay=peers.DECAY), self.device),
            device=self.device,
            precision="bf16" if self.device.type == "cuda" else "fp32",
            accumulate=1,
            clip=1.0,
            world=World(self.device, "ddp"),
        )
        number = 0
        losses: list[float] = []

        def call() -> None:
            nonlocal number
            if step.full:
                losses.extend(step.look().losses)
            step(number, self.source.batches[number % len(self.source.batches)], 1.0)
            number += 1

        seconds = self._seconds(call)
        losses.extend(step.look().losses)
        if arm != "oelm frozen":
            return _Measured(seconds, losses[:CURVE])
        replayed = type(step) is not Step
        ceiling = step_ceiling(model, call, tokens=self.tokens, dtype=step.dtype, replayed=replayed)
        return _Measured(seconds, losses[:CURVE], ceiling)

    def _seconds(self, call: Callable[[], Any]) -> float:
        for _ in range(self.warm):
            call()
        return _median(call, self.steps, self.device)


GPT_ARMS = (
    "oelm",
    "oelm frozen",
    "oelm slices",
    "oelm plain",
    "by hand",
    "by hand compiled",
    "HF eager",
    "HF compiled",
)
HUB_ARMS = ("oelm", "oelm frozen", "oelm plain", "Trainer", "Trainer compiled")


def arms_of(spec: Shape | HubModel) -> tuple[str, ...]:
    """The arms that a model has: ours, and what people would use for it."""
    return GPT_ARMS if isinstance(spec, Shape) else HUB_ARMS


def bench(
    name: str,
    spec: Shape | HubModel,
    *,
    batch: int,
    context: int,
    arms: tuple[str, ...],
    dropout: float,
    device: torch.device,
    steps: int = 60,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Times of every arm on one model, with the ceilings they are measured against."""
    if isinstance(spec, Shape):
        spec = spec.changed(dropout=dropout)
    shared = _Bench(spec, batch, context, dropout, device, steps)
    limits = ceilings(device)
    product = limits["product_flops"]
    floor = step_flops(spec, batch, context) / product if product else None
    timings: list[Timing] = []
    frozen: Mapping[str, float] | None = None
    for arm in arms:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found = shared.measure(arm)
        seconds = found.seconds
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        share = floor / seconds if floor else None
        timings.append(Timing(arm, batch, context, seconds * 1e3, shared.tokens / seconds, peak, share, found.losses))
        frozen = found.ceiling or frozen
        say(f"{arm:18s} {seconds * 1e3:9.3f} ms a step, {shared.tokens / seconds:,.0f} tokens/s")
    return {
        "preset": name,
        "batch": batch,
        "context": context,
        "dropout": dropout,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ceilings": limits,
        "floor_ms": floor * 1e3 if floor else None,
        "freezing": _freezing(timings, frozen),
        "timings": [t.to_dict() for t in timings],
    }


def _freezing(timings: list[Timing], ceiling: Mapping[str, float] | None) -> dict[str, float] | None:
    """What freezing saved of our own step, beside what the step's profile says it can save."""
    ms = {t.arm: t.ms for t in timings}
    if ceiling is None or "oelm" not in ms:
        return None
    return {
        "saved_share": 1 - ms["oelm frozen"] / ms["oelm"],
        "ceiling_share": ceiling["share"],
        "weight_gradient_ms": ceiling["weight_gradient_seconds"] * 1e3,
        "optimizer_ms": ceiling["optimizer_seconds"] * 1e3,
    }


def table(found: dict[str, Any]) -> str:
    """The arms as lines: time, ratio to the first arm, tokens, memory, share of the floor, and a loss to compare."""
    lines = [
        f"{found['preset']}, {found['batch']} sequences of {found['context']} tokens a step, "
        f"dropout {found['dropout']:g}, {found['device']}, torch {found['torch']}",
        f"floor {found['floor_ms']:.3f} ms: the step's products at {found['ceilings']['product_flops'] / 1e9:,.0f} "
        f"GFLOP/s, a large product's rate here; a large copy moves {found['ceilings']['copy_bytes'] / 1e9:,.0f} GB/s",
        f"{'arm':18s} {'ms/step':>9s} {'ratio':>6s} {'tokens/s':>12s} {'GiB':>6s} {'floor/time':>10s} {f'loss {CURVE}':>8s}",
    ]
    first = found["timings"][0]["ms"]
    for one in found["timings"]:
        memory = "" if one["peak_gib"] is None else f"{one['peak_gib']:.1f}"
        loss = f"{one['losses'][-1]:8.4f}" if one["losses"] else ""
        lines.append(
            f"{one['arm']:18s} {one['ms']:9.3f} {one['ms'] / first:6.2f} {one['tokens_per_s']:12,.0f} "
            f"{memory:>6s} {one['of_floor']:10.0%} {loss:>8s}"
        )
    if found["freezing"]:
        lines.append(
            f"freezing Q/K saved {found['freezing']['saved_share']:.1%} of our step; the profile allows "
            f"{found['freezing']['ceiling_share']:.1%} (weight gradients {found['freezing']['weight_gradient_ms']:.3f} ms, "
            f"AdamW {found['freezing']['optimizer_ms']:.3f} ms); a claim far above is a fault of measurement"
        )
    return "\n".join(lines)
