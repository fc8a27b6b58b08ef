"""How long training takes, said honestly: warm-up steps, stalls, evaluation and saving are left out, and named as left out."""

from __future__ import annotations

import time
from array import array
from typing import Any

import numpy as np


WARMUP_STEPS = 100
OUTLIER = 3.0


class Clock:
    """Times of steps and evaluations. Times before a resume are carried along."""

    def __init__(self) -> None:
        self.steps = array("d")
        self.step_tokens = array("d")
        self.evaluations = array("d")
        self.compile_seconds = 0.0
        self._began = time.perf_counter()
        self._before = 0.0

    def restore(self, *, seconds: float, steps: Any, tokens: Any, evaluations: Any) -> None:
        """Continue the clock of a resumed run."""
        self._before = seconds
        self.steps = array("d", steps)
        self.step_tokens = array("d", tokens)
        self.evaluations = array("d", evaluations)

    def forget_after(self, step: int) -> int:
        """Drop the steps after `step`, which did not happen; returns their tokens."""
        gone = sum(self.step_tokens[step:])
        del self.steps[step:], self.step_tokens[step:]
        return int(gone)

    @property
    def seconds(self) -> float:
        """Wall time of this run, over all its processes' lives."""
        return self._before + time.perf_counter() - self._began

    def measured(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Step times and tokens with the first steps and the outliers left out."""
        times = np.asarray(self.steps)[WARMUP_STEPS:]
        tokens = np.asarray(self.step_tokens)[WARMUP_STEPS:]
        if not len(times):
            return times, tokens
        keep = times <= OUTLIER * np.median(times)
        return times[keep], tokens[keep]

    def typical(self) -> float | None:
        """The median step time so far: measured steps if there are any, else all."""
        times, _ = self.measured()
        if not len(times):
            times = np.asarray(self.steps)
        return float(np.median(times)) if len(times) else None

    def tokens_per_s(self) -> float | None:
        times, tokens = self.measured()
        if not len(times):
            times, tokens = np.asarray(self.steps), np.asarray(self.step_tokens)
        return float(tokens.sum() / times.sum()) if len(times) and times.sum() > 0 else None

    def summary(self) -> dict[str, Any]:
        """The fields of the original's timing_stats.json, and ours."""
        times, _ = self.measured()
        some = len(times) > 0

        def of(function: Any, *more: Any) -> float | None:
            return float(function(times, *more)) if some else None

        evaluations = np.asarray(self.evaluations)
        return {
            "wall_time": self.seconds,
            "steps_total": len(self.steps),
            "steps_measured": len(times),
            "left_out": f"the first {WARMUP_STEPS} steps, steps over {OUTLIER:g} times the median, evaluation, saving and compilation",
            "step_time_mean": of(np.mean),
            "step_time_std": of(np.std),
            "step_time_median": of(np.median),
            "step_time_min": of(np.min),
            "step_time_max": of(np.max),
            "step_time_p95": of(np.percentile, 95),
            "step_time_p99": of(np.percentile, 99),
            "train_time": float(np.sum(np.asarray(self.steps))),
            "validation_time_total": float(evaluations.sum()),
            "validation_time_mean": float(evaluations.mean()) if len(evaluations) else None,
            "validation_count": len(evaluations),
            "compile_time": self.compile_seconds,
        }
