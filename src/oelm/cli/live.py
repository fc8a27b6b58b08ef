"""One live display of a study that is being run: all runs' progress, time left, tokens a second, losses.

Reads run folders from a thread of its own, as the monitor does; the runner knows nothing of it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oelm.study import cost
from oelm.study.watch import Watcher, main_metric


if TYPE_CHECKING:
    from oelm.study.plan import Plan

EVERY = 0.5  # seconds between looks


class StudyDisplay:
    """A context: inside it the display is alive, and `say` prints a line above it."""

    def __init__(self, plan: Plan, runs: Path, console: Console) -> None:
        self._watcher = Watcher(runs, plan.study.name)
        self._steps = {one.id: cost.steps(one.run) for one, _ in plan.rows}

        # Comparison runs get their rate, and with it their id, after tuning: only their number is known before.
        self._total = sum(self._steps.values())
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._begun = time.monotonic()
        self._before: int | None = None  # steps that were done when the display began

    def __enter__(self) -> StudyDisplay:
        (self._watcher.runs / str(self._watcher.study)).mkdir(parents=True, exist_ok=True)
        self._live.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._end.set()
        self._thread.join()
        self._live.__exit__(*problem)

    def say(self, message: str) -> None:
        """A line that stays."""
        self._console.print(Text(message), soft_wrap=True)

    def _watch(self) -> None:
        while not self._end.wait(EVERY):
            self._live.update(self._draw(), refresh=True)

    def _draw(self) -> Group:
        runs = self._watcher.snapshot()["runs"]
        done = sum((r["steps"] or 0) if r["state"] in ("done", "diverged") else (r["step"] or 0) for r in runs)
        self._before = done if self._before is None else self._before
        spent = time.monotonic() - self._begun
        pace = (done - self._before) / spent if spent > 1 else 0.0
        left = f"{_clock((self._total - done) / pace)} left" if pace > 0 else "time left: not known yet"
        finished = sum(r["state"] in ("done", "diverged") for r in runs)
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self._total), completed=min(done, self._total), width=24)
        head.add_row(bar, f"{finished}/{len(self._steps)} runs", f"{_clock(spent)} gone, {left}")
        lines = Table.grid(padding=(0, 2))
        for r in runs:
            if r["state"] != "running":
                continue
            speed = f"{r['tokens_per_s']:,.0f} tokens/s" if r["tokens_per_s"] else ""
            loss = "" if r["loss"] is None else f"loss {r['loss']:.3f}"
            step = f"{r['step'] or 0}/{r['steps'] or '?'}"
            lines.add_row(Text(r["id"]), step, loss, main_metric(r["validation"]), speed, Text(r["spark"]))
        return Group(head, lines)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
