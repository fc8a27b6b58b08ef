"""The loops people write, as peers of ours in `oelm bench`: by hand, and Hugging Face's Trainer with its defaults.

Each gets the same weights, batches and rate as ours. Nothing else in the package uses them.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.errors import MachineError
from oelm.models.shapes import Shape


Batches = list[dict[str, np.ndarray[Any, Any]]]
RATE = 1e-4
DECAY = 0.01


class ByHand(nn.Module):
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


def loop(model: nn.Module, loss_of: Callable[..., Any], arrays: Batches, device: torch.device) -> Callable[[], None]:
    """One step of the usual loop: autocast, backward, clip, fused AdamW."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    batches = [{k: torch.from_numpy(v).to(device) for k, v in b.items()} for b in arrays]
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


def hf_gpt2(shape: Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.hidden,
        activation_function="gelu" if shape.activation == "gelu" else "gelu_pytorch_tanh",
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def hf_loss(model: nn.Module) -> Callable[..., Any]:
    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = model(input_ids=inputs).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


def trainer(
    model: nn.Module, arrays: Batches, device: torch.device, *, steps: int, warm: int, compiled: bool
) -> tuple[list[float], list[float]]:
    """Hugging Face's Trainer over the batches, in their order: seconds of each step after `warm`, and all losses.

    Its defaults but for the rate's schedule (constant), saving and reporting (none); bfloat16 on a GPU, as ours.
    """
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory(prefix="oelm-bench-") as folder:
        try:
            from transformers import Trainer, TrainerCallback, TrainingArguments

            options = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=len(arrays[0]["inputs"]),
                max_steps=warm + steps,
                learning_rate=RATE,
                weight_decay=DECAY,
                lr_scheduler_type="constant",
                bf16=device.type == "cuda",
                use_cpu=device.type == "cpu",
                torch_compile=compiled,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
        except ImportError as error:
            said = " ".join(str(error).split())[:120]
            raise MachineError(
                f"bench: the Trainer cannot be used ({said}); pip install transformers accelerate"
            ) from None
        losses: list[Tensor] = []
        marks: list[Any] = []

        class Timed(Trainer):
            def compute_loss(self, *args: Any, **more: Any) -> Any:
                found = super().compute_loss(*args, **more)
                losses.append((found[0] if isinstance(found, tuple) else found).detach())
                return found

        class Marks(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                marks.append(_mark(device))

        Timed(model=model, args=options, train_dataset=_Rows(arrays), callbacks=[Marks()]).train()
        seconds = _between(marks[max(warm, 1) - 1 :], device)
    return seconds, torch.stack(losses).float().tolist()


class _Rows(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Rows of the batches, one after another and over again, under the names that Hugging Face's models use."""

    names = (("inputs", "input_ids"), ("mask", "attention_mask"), ("types", "token_type_ids"), ("labels", "labels"))

    def __init__(self, arrays: Batches) -> None:
        self.arrays = arrays

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            for batch in self.arrays:
                for row in range(len(batch["inputs"])):
                    yield {theirs: batch[ours][row] for ours, theirs in self.names if ours in batch}


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(marks: list[Any], device: torch.device) -> list[float]:
    if device.type != "cuda":
        return [b - a for a, b in pairwise(marks)]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
