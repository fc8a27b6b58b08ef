"""A trainer that only counts: the runner's tests need folders and exit codes, not torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from oelm import errors
from oelm.train.folder import RunFolder
from oelm.train.run import Run, run_id


def train(run: Run, folder: Path, *, study: str, row: str, device: str, **_: Any) -> None:
    """Counts steps; the loss is lowest at a rate of 3e-3. Faults are asked for by the environment."""
    folder.parent.joinpath("starts.log").open("a").write(f"{row} {os.getpid()} {device}\n")
    folder.parent.joinpath("pipes.log").open("a").write(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "") + "\n")
    fault = json.loads(os.environ.get("FAKE_FAULTS", "{}")).get(row, "")
    gate = Path(os.environ.get("FAKE_GATE", folder.parent))  # nothing goes on before it is there
    while not gate.exists():
        time.sleep(0.01)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    with RunFolder(folder, run) as place:
        if place.result():
            return
        begun = int((folder / "latest").read_text()) if (folder / "latest").exists() else 0
        place.open_metrics(begun)
        for step in range(begun + 1, (run.budget.steps or 1) + 1):
            time.sleep(float(os.environ.get("FAKE_SECONDS", "0.002")))
            place.beat(step=step)
            place.log({"step": step, "tokens": step, "kind": "train", "loss": 5 / step, "tokens_per_s": 10.0})
            (folder / "latest").write_text(str(step))
            _checkpoint(folder, step)
            if asked:
                raise errors.Preempted(f"{folder}: saved at step {step}; run again")
            _maybe(fault, folder, step)
        loss = abs(run.optimizer.lr - 3e-3) * 100 + 1 + run.seed / 1e4
        place.write("result.json", _result(run, row, study, "diverged" if fault == "diverge" else "done", loss))
        if fault == "diverge":
            raise errors.DivergedError(f"{folder}: the loss is not finite")


def _checkpoint(folder: Path, step: int) -> None:
    """The last two, of which the first is the best."""
    place = folder / "checkpoints" / f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "checkpoints" / f"step-{step - 2}", ignore_errors=True)
    (folder / "best").write_text(f"checkpoints/step-{step - 1}\n")


def _maybe(fault: str, folder: Path, step: int) -> None:
    once = folder / "fault-was-here"
    if fault == "kill-once" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "memory-beside" and not once.exists():
        once.touch()
        raise errors.OutOfMemory(f"{folder}: out of memory")
    if fault == "data":
        raise errors.DataError("data 'openwebtext' is not here; put it in ./data/openwebtext")
    if fault == "disk":
        raise OSError(28, "No space left on device")
    if fault == "bug":
        raise ZeroDivisionError("a bug\nover two lines")


def _result(run: Run, row: str, study: str, status: str, loss: float) -> dict[str, Any]:
    steps = run.budget.steps or 1
    return {
        "schema": 1,
        "run_id": run_id(row, run),
        "study": study,
        "row": row,
        "status": status,
        "run": run.model_dump(mode="json"),
        "metrics": {"validation": {"loss": loss, "perplexity": 2.0**loss}, "test": {"loss": loss}, "best": None},
        "params": {"total": 1000, "trainable": 900, "frozen": 100},
        "cost": {"seconds": steps * 0.01, "tokens_per_s": 10.0},
        "environment": {"device": "cpu"},
        "curve": [[i, 5 / i] for i in range(1, steps + 1)],
        "error": None,
    }
