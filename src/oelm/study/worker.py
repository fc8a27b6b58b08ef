"""The process that trains: takes runs one after another, each in a folder of its own, so that start-up is paid once.

Runs arrive as JSON lines on stdin; an answer per run goes to the descriptor `--answers`. After anything but a finished
run the process ends, so that no run starts in the remains of a broken one. It dies with its parent (leash).
With `--single` it trains one run and leaves its answer in a file: the form that torchrun and Slurm start.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from oelm.errors import OelmError
from oelm.train.run import Run


TRAINER = "oelm.train.loop:train"
_PR_SET_PDEATHSIG = 1


def leash(parent: int) -> None:
    """Die (SIGKILL) when the parent does: a killed runner must leave no trainer behind. -1: whoever the parent is."""
    if parent == 0 or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent > 0 and os.getppid() != parent:  # it died before the leash was on
        os._exit(1)


def train_one(task: dict[str, Any], trainer: str = TRAINER) -> dict[str, Any]:
    """Train the run of a task; what happened as an exit code and one line."""
    folder = Path(task["folder"])
    try:
        run = Run.read(task["run"], where=f"row {task['row']}")
        module, _, name = trainer.partition(":")
        train = getattr(importlib.import_module(module), name)
        data_folder = Path(task["data_folder"]) if task.get("data_folder") else None
        train(
            run,
            folder,
            device=task["device"],
            data_folder=data_folder,
            progress="none",
            study=task["study"],
            row=task["row"],
        )
        _drop(folder, task.get("keep", "all"))
        code, message = 0, ""
    except OelmError as error:
        code, message = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, message = 130, "interrupted; the same command continues"
    except MemoryError:
        code, message = (
            9,
            f"{folder}: out of memory; use a smaller batch or budget.accumulate, or fewer runs per device",
        )
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        said = "disk full; free space and run again" if full else f"{error.strerror or error}; check the disk"
        code, message = 5, f"{folder}: {said}"
    except Exception as error:
        code, message = 1, f"{type(error).__name__}: {error}; the traceback is in {_crash(folder)}"
    return {"id": task["id"], "code": code, "message": " ".join(message.split())}


def _drop(folder: Path, keep: str) -> None:
    """A finished run's checkpoints that the study does not want to keep."""
    if keep != "all" and os.environ.get("RANK", "0") == "0":
        from oelm.study.archive import drop_checkpoints

        drop_checkpoints(folder, keep_best=keep == "best")


def _crash(folder: Path) -> Path:
    path = folder / "crash.txt"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
    return path


def train_on_many(task: dict[str, Any], trainer: str = TRAINER) -> dict[str, Any]:
    """The same with several processes (task["nproc"]) under torchrun; the answer comes back in a file."""
    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".task.json"
    path.write_text(json.dumps(task))
    path.with_suffix(".answer").unlink(missing_ok=True)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={task['nproc']}"]
    argv += ["-m", "oelm.study.worker", "--single", str(path), "--parent", "-1", "--trainer", trainer]
    leashed = [sys.executable, "-m", "oelm.study.leash", str(os.getpid()), *argv]
    child = subprocess.Popen(leashed, start_new_session=True)
    old = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    status = child.wait()
    signal.signal(signal.SIGTERM, old)
    try:
        answer: dict[str, Any] = json.loads(path.with_suffix(".answer").read_bytes())
    except (OSError, ValueError):
        answer = {"id": task["id"], "code": 1, "message": f"torchrun ended with status {status}; see {folder}"}
    return answer


def _serve(answers: int, trainer: str) -> int:
    for line in sys.stdin:
        task = json.loads(line)
        answer = train_on_many(task, trainer) if task.get("nproc", 1) > 1 else train_one(task, trainer)
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(BrokenPipeError):  # the runner is gone; the record is in the folder
            os.write(answers, (json.dumps(answer) + "\n").encode())
        if answer["code"] not in (0, 7):
            return 0
    return 0


def _single(path: Path, trainer: str) -> int:
    """One run from a task file; only the first rank leaves an answer."""
    task = json.loads(path.read_text())
    answer = train_one(task, trainer)
    if os.environ.get("RANK", "0") == "0" or answer["code"] not in (0, 7):
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_text(json.dumps(answer))
        os.replace(draft, path.with_suffix(".answer"))
    return int(answer["code"])


def main(argv: list[str] | None = None) -> int:
    """Serve a runner, or train the one run of `--single`."""
    parser = argparse.ArgumentParser(prog="oelm.study.worker")
    parser.add_argument("--answers", type=int)
    parser.add_argument("--single", type=Path)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--trainer", default=TRAINER)
    args = parser.parse_args(argv)
    leash(args.parent)
    if args.single is not None:
        return _single(args.single, args.trainer)
    return _serve(args.answers, args.trainer)


if __name__ == "__main__":
    sys.exit(main())
