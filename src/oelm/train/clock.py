"""How long training takes, said honestly: the first steps, stalls, evaluation, saving and compiling are left out, and said so.

On a GPU a step's time is that between two events of its stream, so that measuring never makes the host wait.
"""

from __future__ import annotations

import functools
import math
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


WARMUP_STEPS = 100
OUTLIER = 3.0
RECENT = 1000  # steps that a speed shown during training is the speed of

Array = np.ndarray[Any, Any]


class Clock:
    """Times of steps and evaluations; those before a resume are carried along."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = array("d")
        self.tokens = array("d")
        self.evaluations = array("d")
        self.compile_seconds = 0.0
        self._began = time.perf_counter()
        self._before = 0.0
        self._mark = 0.0
        self._events: list[torch.cuda.Event] = []

    # -- measuring

    def start(self) -> None:
        """Just before a step is queued."""
        if self.device.type == "cuda":
            if not self._events:
                self._events.append(self._event())
        else:
            self._mark = time.perf_counter()

    def stop(self, tokens: int) -> None:
        """Just after; on a GPU the time itself is read later, by `settle`."""
        self.tokens.append(tokens)
        if self.device.type == "cuda":
            self._events.append(self._event())
        else:
            self.steps.append(time.perf_counter() - self._mark)

    @contextmanager
    def compiling(self, *, if_new: bool) -> Iterator[None]:
        """Inside: a step that may compile and capture first. On a CPU nothing is compiled."""
        began = time.perf_counter()
        yield
        if if_new and self.device.type == "cuda":
            self.compile_seconds += time.perf_counter() - began

    def settle(self) -> None:
        """After the device has finished: read the times of the steps since, and begin a new stretch."""
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            self.steps.extend(a.elapsed_time(b) / 1000 for a, b in pairs)
            self._events = []

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside: an evaluation; one that is broken off is not counted."""
        began = time.perf_counter()
        yield
        self.evaluations.append(time.perf_counter() - began)

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = _timer()
        event.record()
        return event

    def forget_after(self, step: int) -> int:
        """Drop the steps after `step`, which did not happen; returns their tokens."""
        gone = sum(self.tokens[step:])
        del self.steps[step:], self.tokens[step:]
        return int(gone)

    # -- carried by checkpoints

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"clock|{name}": torch.tensor(getattr(self, name), dtype=torch.float64)
            for name in ("steps", "tokens", "evaluations")
        }

    def load(self, tensors: Mapping[str, Tensor], seconds: float) -> None:
        """Continue the clock of a resumed run."""
        self._before = seconds
        for name in ("steps", "tokens", "evaluations"):
            setattr(self, name, array("d", tensors[f"clock|{name}"].tolist()))

    # -- reading

    @property
    def seconds(self) -> float:
        """Wall time of this run, over all its processes' lives."""
        return self._before + time.perf_counter() - self._began

    def measured(self) -> tuple[Array, Array]:
        """Step times and tokens with the first steps and the outliers left out."""
        times, tokens = np.asarray(self.steps)[WARMUP_STEPS:], np.asarray(self.tokens)[WARMUP_STEPS:]
        if not len(times):
            return times, tokens
        keep = times <= OUTLIER * np.median(times)
        return times[keep], tokens[keep]

    def speed(self) -> tuple[float, float] | None:
        """Median seconds of a step and tokens a second, of the latest steps."""
        times, tokens = np.asarray(self.steps[-RECENT:]), np.asarray(self.tokens[-RECENT:])
        if not len(times) or not times.sum():
            return None
        median = float(np.median(times))
        keep = times <= OUTLIER * median
        return median, float(tokens[: len(times)][keep].sum() / times[keep].sum())

    def cost(self) -> tuple[float | None, float | None]:
        """Median seconds of a step and tokens a second, of the measured steps; of all where there are too few."""
        times, tokens = self.measured()
        if not len(times):
            times, tokens = np.asarray(self.steps), np.asarray(self.tokens)
        if not len(times):
            return None, None
        return float(np.median(times)), float(tokens.sum() / times.sum()) if times.sum() else None

    def summary(self) -> dict[str, Any]:
        """The fields of the original's timing_stats.json, and ours."""
        times, tokens = self.measured()
        evaluations = np.asarray(self.evaluations)

        def of(values: Array, function: Any, *more: Any) -> float | None:
            return float(function(values, *more)) if len(values) else None

        return {
            "wall_time": self.seconds,
            "steps_total": len(self.steps),
            "steps_measured": len(times),
            "left_out": f"the first {WARMUP_STEPS} steps, steps over {OUTLIER:g} times the median, evaluation, saving, compiling",
            "mean_step_time": of(times, np.mean),
            "std_step_time": of(times, np.std),
            "median_step_time": of(times, np.median),
            "min_step_time": of(times, np.min),
            "max_step_time": of(times, np.max),
            "p95_step_time": of(times, np.percentile, 95),
            "p99_step_time": of(times, np.percentile, 99),
            "train_time": float(np.sum(np.asarray(self.steps))),
            "validation_time_total": float(evaluations.sum()),
            "validation_time_mean": of(evaluations, np.mean),
            "validation_count": len(evaluations),
            "tokens_per_s": float(tokens.sum() / times.sum()) if len(times) else None,
            "compile_time": self.compile_seconds,
        }


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measured_ceiling(device: torch.device, dtype: torch.dtype | None) -> float:
    """FLOP/s that a large matrix product reaches on this device in this precision."""
    if device.type != "cuda":
        return _cpu_ceiling(torch.get_num_threads())
    size = 8192
    a = torch.randn(size, size, device=device, dtype=dtype or torch.float32)
    best = 0.0
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        a @ a
        end.record()
        end.synchronize()
        best = max(best, 2 * size**3 / (start.elapsed_time(end) / 1000))
    return best


@functools.cache
def _cpu_ceiling(threads: int) -> float:
    """The best of a few float32 products; a tenth of a second, once a process."""
    size = 1024
    a = torch.ones(size, size)
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
