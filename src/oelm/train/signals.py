"""Signals that ask a run to stop: save, say so, leave with the code that asks for a requeue.

While a step or a save runs, a signal only raises a flag; where nothing would be lost (loading, evaluating)
it ends the wait at once. A second Ctrl-C leaves immediately.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from oelm.errors import Preempted


ASKING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT") if hasattr(signal, name)
)


class StopAsked(BaseException):
    """Raised inside an interruptible wait. Not an Exception: nothing on the way may swallow it."""


class Signals:
    """Handlers for the life of a run; the old ones are put back. Outside the main thread: no handlers."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._interruptible = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                if signal.getsignal(number) in (signal.SIG_IGN, None):
                    continue  # nohup, or a background job: who started us chose to ignore it
                self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.asked is not None
        self.asked = self.asked or signal.Signals(number)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._interruptible:
            self._interruptible = False
            raise StopAsked

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside: a signal ends the block with StopAsked, at once."""
        if self.asked is not None:
            raise StopAsked
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Inside, there is nothing to save yet: a signal ends the block at once with the code that asks for a requeue.

    For the seconds in which torch is imported; training puts handlers of its own above these.
    """
    with Signals() as signals:
        try:
            with signals.interruptible():
                yield
        except BaseException:  # an import that is cut off may say so in words of its own
            if signals.asked is None:
                raise
            if signals.asked == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise Preempted(
                f"{what}: stopped by {signals.asked.name} with nothing to save; run the same command again"
            ) from None


def ignored_from_here() -> None:
    """What was asked for is done: a signal in the last moments of the process must not make it look undone."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
