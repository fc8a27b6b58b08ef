"""A data source as the loop's evaluations read it: watched between batches, and asked which test examples were right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Watched:
    """A source that says so before each of its evaluation batches, for the heartbeat and for signals to many ranks; and
    that keeps what a classifier got right of the test."""

    def __init__(self, source: Any, between: Callable[[int], None]) -> None:
        self._source, self._between = source, between
        self.right: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def eval_batches(self, *args: Any, **more: Any) -> Iterator[Any]:
        for number, batch in enumerate(self._source.eval_batches(*args, **more)):
            self._between(number)
            yield batch

    def score(self, split: str, outputs: Any) -> dict[str, Any]:
        if split != "test" or self._source.kind != "classify":
            return dict(self._source.score(split, outputs))
        found: dict[str, Any] = self._source.score(split, outputs, per_example=True)
        self.right = found["per_example"]
        return found
