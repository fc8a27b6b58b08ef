"""Where a run stands, as plain data: what a checkpoint's state.json carries beside tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from oelm.errors import CheckpointError


EXPLODED = 3.0  # times the first loss, and at least that many nats ...
EXPLODED_STEPS = 20  # ... in each of so many steps in a row: diverged, though every number is finite


class Diverged(Exception):
    """Training left the road: where and how. good: the last step whose weights were still on it."""

    def __init__(self, why: str, *, good: int) -> None:
        super().__init__(why)
        self.good = good


@dataclass
class State:
    """Counts, the losses not yet logged, and what validation has said so far."""

    step: int = 0  # steps that have happened
    tokens: int = 0
    examples: int = 0
    lines: int = 0  # of metrics.jsonl
    seconds: float = 0.0
    evaluated_at: int = 0
    pending: list[list[float | None]] = field(default_factory=list)  # [loss, norm] of the steps since the last line
    high_since: int | None = None  # the first of the latest steps in a row with a loss above the rule's
    first_loss: float | None = None
    curve: list[list[float | None]] = field(default_factory=list)  # [tokens, validation loss]
    validation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None  # {"step", and the metrics of that evaluation}
    worse: int = 0  # evaluations since the best one
    stopped_early: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> State:
        """The state of a checkpoint; another form is refused."""
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            odd = ", ".join(sorted(set(data) ^ names))
            raise CheckpointError(
                f"state.json: has another form than this version reads ({odd}); use the oelm that wrote it"
            )
        return cls(**data)

    def took(self, losses: list[float], norms: list[float]) -> None:
        """Note the losses and gradient norms of the latest steps; a float16 step that was skipped has no norm."""
        self.pending += [[_known(loss), _known(norm)] for loss, norm in zip(losses, norms, strict=True)]
        if self.first_loss is None and losses:
            self.first_loss = losses[0]
        for number, loss in enumerate(losses, self.step - len(losses) + 1):
            if loss <= self._limit:
                self.high_since = None
            elif self.high_since is None:
                self.high_since = number

    @property
    def _limit(self) -> float:
        return EXPLODED * max(1.0, self.first_loss or 1.0)

    def check_explosion(self) -> None:
        """Raise Diverged when the loss has stayed far above where it began."""
        since = self.high_since
        if since is not None and self.step - since + 1 >= EXPLODED_STEPS:
            raise Diverged(
                f"step {self.step}: the loss exploded: above {self._limit:.3g} from step {since} on, {self.first_loss:.3g} at first",
                good=self.last_good,
            )

    @property
    def last_good(self) -> int:
        """The last step after which the loss was not yet above the rule's: a step's loss is that of the weights before it."""
        return self.step if self.high_since is None else max(0, self.high_since - 2)

    def means(self) -> tuple[float | None, float | None] | None:
        """The mean loss and norm since the last line, which begins anew; None when no step was made."""
        if not self.pending:
            return None
        losses, norms = zip(*self.pending, strict=True)
        self.pending = []
        return _mean(losses), _mean(norms)

    def judge(self, metrics: dict[str, Any], patience: int) -> bool:
        """Take an evaluation in; whether it is the best so far. Sets stopped_early when patience is at its end."""
        self.evaluated_at = self.step
        self.validation = metrics
        loss = metrics["loss"]
        usable = loss is not None and math.isfinite(loss)
        self.curve.append([self.tokens, loss if usable else None])
        if usable and (self.best is None or loss < self.best["loss"]):
            self.best = {**metrics, "step": self.step}
            self.worse = 0
            return True
        self.worse += 1
        if patience and self.worse >= patience:
            self.stopped_early = True
        return False


def _known(value: float) -> float | None:
    """A number that JSON, and so a checkpoint, can hold."""
    return value if math.isfinite(value) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
