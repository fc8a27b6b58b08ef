"""Runs in processes of their own that can be killed, and what two finished runs must have in common."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a thaw resets it: imported once here, not once in every fork

from oelm.errors import OelmError
from oelm.train.checkpoint import read_checkpoint
from oelm.train.loop import train
from oelm.train.run import Run


TIMES = ("tokens_per_s", "seconds")


def forked(work: Callable[[], Any]) -> int:
    """Start work in a fork; its exit code is 0, an OelmError's, 130 or 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except OelmError as error:
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def training(run: Run, folder: Path, **options: Any) -> int:
    return forked(lambda: train(run, folder, progress="none", **options))


def ended(pid: int, patience: float = 60.0) -> int:
    """The exit code of a child, minus the signal's number if it was killed."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} was still running after {patience} s")


def wait_for(seen: Callable[[], bool], patience: float = 30.0) -> None:
    until = time.monotonic() + patience
    while not seen():
        assert time.monotonic() < until, "what was waited for did not happen"
        time.sleep(0.002)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines(folder)]


def assert_same_end(folder: Path, reference: Path) -> None:
    """Bit-equal weights, optimiser and random states; the same lines once each; the same numbers in the record."""
    mine, theirs = (read_checkpoint(f / (f / "latest").read_text().strip()) for f in (folder, reference))
    assert mine.step == theirs.step
    for file in ("model", "optimizer", "extra"):
        assert set(mine.tensors[file]) == set(theirs.tensors[file])
        for name, tensor in mine.tensors[file].items():
            if not name.startswith("clock|"):
                assert torch.equal(tensor, theirs.tensors[file][name]), f"{file}: {name} differs"
    assert without_times(folder) == without_times(reference)
    a, b = (json.loads((f / "result.json").read_text()) for f in (folder, reference))
    for key in ("status", "metrics", "params", "frozen_digest", "logit_std", "curve"):
        assert a[key] == b[key], key
    assert a["data"]["tokens_seen"] == b["data"]["tokens_seen"]
    assert a["data"]["examples_seen"] == b["data"]["examples_seen"]
    assert not list((folder / "checkpoints").glob("*.tmp")), "a killed save left something behind"
