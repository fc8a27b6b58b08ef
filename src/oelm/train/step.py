"""One optimiser step: batch in, update done, nothing waited for.

The update of a step whose loss or gradient is not finite is masked in that very step and every one after it;
the host learns so at its next look. Everything the loop needs of a step is in Step's five public methods.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from oelm.errors import DataError
from oelm.models.vocabulary import IGNORED
from oelm.train.optim import Optimizers
from oelm.train.parallel import World, whole


WINDOW = 4096  # steps whose losses the device can hold between two looks

Batch = Mapping[str, np.ndarray[Any, Any]]


@dataclass
class Look:
    """What the host learned since the look before: losses and gradient norms by step, and the first bad step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    bad_at: int | None = None


def pick_precision(wanted: str, device: torch.device) -> str:
    """What is computed in: float32 on a CPU, float16 with a scaler on a GPU without bfloat16."""
    if device.type == "cpu":
        return "fp32"
    if wanted == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp16"
    return wanted


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Mixed precision, or nothing for float32."""
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors; copies to a GPU are queued from pinned memory."""
    if device.type != "cuda":
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}
    return {
        name: torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)
        for name, array in batch.items()
    }


def targets_in(batch: Batch) -> int:
    """Over how many predictions the loss of a batch is the mean."""
    for name in ("targets", "labels", "start"):
        if name in batch:
            return int(np.count_nonzero(batch[name] != IGNORED))
    return examples_in(batch)


def tokens_in(batch: Batch) -> int:
    """Tokens read, padding left out."""
    mask = batch.get("mask")
    return int(batch["inputs"].size if mask is None else np.count_nonzero(mask))


def examples_in(batch: Batch) -> int:
    return len(batch["inputs"])


def parts(batch: Batch, count: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """A batch cut by rows into `count` parts; a short last batch gives fewer or smaller ones, never empty ones."""
    rows = examples_in(batch)
    edges = np.linspace(0, rows, min(count, rows) + 1).astype(int)
    return [{k: (a[lo:hi] if a.ndim and len(a) == rows else a) for k, a in batch.items()} for lo, hi in pairwise(edges)]


class Task(nn.Module):
    """A model and its objective as one module: what is wrapped, compiled and captured."""

    def __init__(self, model: nn.Module, objective: Any) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a batch as a sum in nats."""
        nats: Tensor = self.objective.sums(self.model, batch)[0]["nats"]
        return nats


class Step:
    """The plain step: eager or compiled forward and backward, clipping, masked update."""

    dtypes: ClassVar = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def __init__(
        self,
        model: nn.Module,
        objective: Any,
        optimizers: Optimizers,
        *,
        device: torch.device,
        precision: str,
        accumulate: int,
        clip: float,
        world: World,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizers = optimizers
        self.device = device
        self.accumulate = accumulate
        self.clip = clip
        self.world = world
        self.dtype = self.dtypes.get(precision)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._losses = torch.zeros(WINDOW, device=device)
        self._norms = torch.zeros(WINDOW, device=device)
        self._filled = 0
        self._bad = torch.zeros((), device=device)  # 1.0 from the first bad step on
        self._bad_at = torch.full((), -1.0, dtype=torch.float64, device=device)
        self._rebuild()

    # -- the interface of the loop

    def __call__(self, step: int, batch: Batch, factor: float) -> None:
        """Queue step `step` (counted from 0) at the schedule's factor."""
        self.optimizers.set_rate(factor)
        pieces = parts(batch, self.accumulate)
        loss = self._gradients(pieces)
        norm = self._norm()
        self._mask(step, loss, norm)
        self._update()
        self._losses[self._filled] = loss
        self._norms[self._filled] = norm
        self._filled += 1

    @property
    def full(self) -> bool:
        """Whether the host must look before the next step."""
        return self._filled >= WINDOW

    def look(self) -> Look:
        """Wait for the device and read what it did since the last look."""
        n, self._filled = self._filled, 0
        if not n:
            return Look()
        host = torch.cat([self._losses[:n].double(), self._norms[:n].double(), self._bad_at[None]]).tolist()
        return Look(host[:n], host[n : 2 * n], int(host[-1]) if host[-1] >= 0 else None)

    def thawed(self) -> None:
        """After requires_grad changed: drop every graph made before it."""
        self._rebuild()

    def tensors(self) -> dict[str, Tensor]:
        """What a resumed step needs beside weights and optimiser."""
        if self.scaler is None:
            return {}
        return {f"scaler|{k}": torch.tensor(float(v), dtype=torch.float64) for k, v in self.scaler.state_dict().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The counterpart of `tensors`."""
        found = {k.removeprefix("scaler|"): v.item() for k, v in tensors.items() if k.startswith("scaler|")}
        if self.scaler is not None and found:
            whole = {"_growth_tracker", "growth_interval"}
            self.scaler.load_state_dict({k: int(v) if k in whole else v for k, v in found.items()})

    # -- how it is done

    def _rebuild(self) -> None:
        self._params = self.optimizers.params
        self._new = True
        self.lacking: list[str] = []  # what trains and got no gradient in the first step since
        self.task = self.world.wrap(Task(self.model, self.objective))

    def _gradients(self, pieces: list[dict[str, np.ndarray[Any, Any]]]) -> Tensor:
        """Gradients of the mean loss over all pieces and processes; returns that loss, detached."""
        self.optimizers.zero_grad()
        count = self.world.total(sum(targets_in(piece) for piece in pieces))
        host_knows = isinstance(count, int) or count.device.type == "cpu"
        if host_knows and not count:  # of many GPUs no host waits for the number: the loss is NaN then
            raise DataError("a training batch has no target: every label is ignored; check the labels and the context")
        share = self.world.size / count  # the processes' gradients are averaged
        total = torch.zeros((), device=self.device)
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with self.world.quiet(self.task, quiet=not last):
                with autocast(self.device, self.dtype):
                    nats = self.task(to_device(piece, self.device))
                loss = nats * share
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            total += loss.detach()
        if self._new:
            self._new = False
            self.lacking = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        return self.world.mean(total)

    def _norm(self) -> Tensor:
        """The gradient's norm before clipping; the gradient is clipped in place."""
        if self.scaler:
            for optimizer in self.optimizers.each:
                self.scaler.unscale_(optimizer)
        limit = self.clip if self.clip > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_([p for p in self._params if p.grad is not None], limit)
        return whole(norm)

    def _mask(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Raise the flag, on the device, if this step must not happen."""
        # With a scaler an overflowing gradient is routine (the scaler skips it and halves); a loss that is not finite never is.
        seen = loss if self.scaler else loss + norm
        bad = (~torch.isfinite(seen)).float()
        first = (bad > 0) & (self._bad == 0)
        self._bad_at = torch.where(first, torch.full_like(self._bad_at, float(step)), self._bad_at)
        self._bad = torch.maximum(self._bad, bad)

    def _update(self) -> None:
        for optimizer in self.optimizers.each:
            if self.scaler is not None:
                if not bool(self._bad):
                    self.scaler.step(optimizer)
            elif self.device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = self._bad  # type: ignore[attr-defined]  # the fused kernel leaves everything as it is
                optimizer.step()
            elif not bool(self._bad):
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()


def make_step(model: nn.Module, objective: Any, optimizers: Optimizers, **how: Any) -> Step:
    """The fastest step that serves this run: a captured graph on one CUDA device, else the plain step."""
    simple = how["accumulate"] == 1 and how["world"].size == 1 and how["precision"] == "bf16"
    adamw = all(type(optimizer) is torch.optim.AdamW for optimizer in optimizers.each)
    if how["device"].type == "cuda" and simple and adamw and importlib.util.find_spec("triton") is not None:
        from oelm.train.capture import CapturedStep

        return CapturedStep(model, objective, optimizers, **how)
    return Step(model, objective, optimizers, **how)
