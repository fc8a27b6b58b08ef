"""A worker as the runner sees it: the process, the run it has, its answers. No torch here.

The child gets its device in its environment before it starts, and a session of its own: Ctrl-C reaches the runner alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oelm.study import claim, devices
from oelm.study.rows import Planned
from oelm.study.worker import TRAINER


Keep = Literal["all", "best", "none"]  # which checkpoints of a finished run
STOP_SECONDS = 30.0  # that workers get to save when the runner is asked to stop


@dataclass(frozen=True)
class Options:
    """How a study is run; nothing of it enters a run's identity."""

    devices: tuple[str, ...] = ("cpu",)
    per_device: int = 1
    nproc: int = 1
    data_folder: Path | None = None
    rows: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = TRAINER
    keep: Keep = "all"
    minutes: float | None = None  # after which nothing runs any more


def task_of(one: Planned, study: str, folder: Path, device: str, options: Options) -> dict[str, Any]:
    """What a worker is told of a run."""
    return {
        "id": one.id,
        "row": one.row,
        "study": study,
        "folder": str(folder / one.id),
        "run": one.run.model_dump(mode="json", exclude_none=True),
        "device": device,
        "data_folder": str(options.data_folder) if options.data_folder else None,
        "nproc": options.nproc,
        "keep": options.keep,
    }


class Worker:
    """A child process of one slot of a device, and the run it has."""

    def __init__(self, device: str, options: Options, log: Path, more: dict[str, str]) -> None:
        self.device = device
        self.run: Planned | None = None
        self.held: claim.Held | None = None
        self.started = 0.0
        self.buffer = b""
        self.gone = False  # its answers have ended
        self.retired = False  # it takes no further run
        read, write = os.pipe()
        argv = [sys.executable, "-m", "oelm.study.worker"]
        argv += ["--answers", str(write), "--parent", str(os.getpid()), "--trainer", options.trainer]
        environment = os.environ | devices.environment(device, options.per_device) | more
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the runner alone, which asks the workers to save
            )
        os.close(write)
        self.answers = read

    def give(self, planned: Planned, held: claim.Held, task: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.run, self.held, self.started = planned, held, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # its end is read from the answers
            self.process.stdin.write((json.dumps(task) + "\n").encode())
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """The next answer; None at the end of the process or while a line is incomplete (then `gone` tells)."""
        if b"\n" not in self.buffer:
            chunk = os.read(self.answers, 65536)
            if not chunk:
                self.gone = True
                return None
            self.buffer += chunk
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None
        self.buffer = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> int:
        """Wait for the end; the exit status (negative: a signal)."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            status = self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.answers)
        return status
