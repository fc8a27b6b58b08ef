"""In which order runs start, and which may still start before the time is over. No torch here.

Tuning comes first, since comparisons wait for it; then the longest, so that no device idles at the end; among runs
of about one length a seed is finished in every arm before the next seed begins: what an interruption leaves is pairs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oelm.study import cost
from oelm.study.folder import metrics
from oelm.study.rows import Planned
from oelm.train.run import Run


class Schedule:
    """The order of a queue and the time that is left, by what runs were seen to take."""

    def __init__(self, device: str, minutes: float | None = None) -> None:
        self.device = device
        self.until = time.monotonic() + 60 * minutes if minutes else math.inf
        self._estimate = cost.Estimator((), device)
        self._took: list[tuple[Run, float]] = []  # runs of this pass, and the seconds from their start to their record

    def learn(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Estimate by these records from now on."""
        self._estimate = cost.Estimator(records, self.device)

    def took(self, one: Planned, seconds: float) -> None:
        """A run was finished in this pass, in so many seconds all in."""
        self._took.append((one.run, seconds))

    def ordered(self, queue: Iterable[Planned]) -> list[Planned]:
        """The queue, first things first."""

        def place(one: Planned) -> tuple[bool, int, int, float]:
            seconds = max(1e-3, self._estimate.seconds(one.run))
            return one.purpose != "tune", -round(2 * math.log2(seconds)), one.run.seed, -seconds

        return sorted(queue, key=place)

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.until

    def fits(self, one: Planned, folder: Path) -> bool:
        """Whether the rest of a run can be finished in time, as far as that is known."""
        left = self.until - time.monotonic()
        if math.isinf(left) or not (self._took or self._estimate.measured):
            return left > 0
        last = max((int(line.get("step", 0)) for line in metrics(folder)), default=0)
        rest = 1 - min(1.0, last / cost.steps(one.run))
        slower = [seconds / self._estimate.seconds(run) for run, seconds in self._took] or [1.0]
        return rest * statistics.median(slower) * self._estimate.seconds(one.run) < left
