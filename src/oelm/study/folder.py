"""What a run folder says: its record, its state, its last numbers. Reads only; no torch here.

A file that is half written, foreign or from another version is a problem that is said, never a traceback.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oelm.errors import ConfigError, nearest
from oelm.study.claim import Claim, holder, process_start


SCHEMA = 1  # of result.json
QUIET = 90.0  # seconds without a heartbeat after which a run counts as stalled
State = Literal["queued", "running", "stalled", "partial", "done", "diverged", "failed", "foreign"]
FINISHED = ("done", "diverged")
TAIL_BYTES = 256 * 1024


@dataclass(frozen=True)
class Look:
    """One look at a run folder."""

    folder: Path
    state: State
    record: dict[str, Any] | None = None
    heartbeat_age: float | None = None
    claim: Claim | None = None
    problem: str = ""

    @property
    def id(self) -> str:
        return self.folder.name


def look(folder: Path) -> Look:
    """The state of one run, from its files alone."""
    claim = holder(folder.parent, folder.name)
    if not folder.is_dir():
        return Look(folder, "running" if claim and claim.alive else "queued", claim=claim)
    record, problem = read_record(folder)
    if record is not None and record.get("run_id") not in (None, folder.name):
        problem = f"{folder}: result.json is of run {record.get('run_id')}; move it where it belongs"
        record = None
    age = heartbeat_age(folder)
    status = record.get("status") if record else None
    if status in FINISHED:
        return Look(folder, status, record, age, claim)
    if problem:
        return Look(folder, "foreign", None, age, claim, problem)
    if (claim is not None and claim.alive) or _trainer_there(folder, record, age):
        since = min(age, claim.held_for) if age is not None and claim else age
        quiet = since is not None and since > QUIET
        return Look(folder, "stalled" if quiet else "running", record, age, claim)
    if status == "failed":
        return Look(folder, "failed", record, age, claim)
    return Look(folder, "partial" if _has_begun(folder) else "queued", record, age, claim)


def _trainer_there(folder: Path, record: dict[str, Any] | None, age: float | None) -> bool:
    """Whether a trainer has the folder: by its process on this machine, by its heartbeat on another."""
    if age is None or (record is not None and _mtime(folder / "result.json") >= _mtime(folder / "heartbeat") - 1.0):
        return False
    try:
        _, pid, _, host = (folder / "lock").read_text().split()  # "pid 123 on here", as the trainer writes it
    except (OSError, ValueError):
        return age < QUIET
    if host == socket.gethostname() and pid.isdigit():
        return age < QUIET * 10 and bool(process_start(int(pid)))
    return age < QUIET


def _has_begun(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "latest", "checkpoints", "training.log"))


def _mtime(path: Path, default: float = 0.0) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return default


def heartbeat_age(folder: Path) -> float | None:
    """Seconds since the trainer last said that it lives."""
    at = _mtime(folder / "heartbeat", -1.0)
    return None if at < 0 else max(0.0, time.time() - at)


def read_record(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """result.json, or None and what is wrong with it (empty when it is not there)."""
    path = folder / "result.json"
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path}: cannot be read ({type(error).__name__}); remove it and run the row again"
    if not isinstance(data, dict):
        return None, f"{path}: is not a run's record; remove it and run the row again"
    if data.get("schema") != SCHEMA:
        return None, (
            f"{path}: is of schema {data.get('schema')!r}, this version reads {SCHEMA}; "
            "read it with the oelm that wrote it, or archive the folder"
        )
    return data, ""


def run_folders(study_folder: Path) -> list[Path]:
    """The run folders of one study, by name."""
    try:
        found = [entry for entry in os.scandir(study_folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
    return sorted((Path(entry.path) for entry in found), key=lambda path: path.name)


def records(study_folder: Path) -> list[dict[str, Any]]:
    """Every readable record of a study."""
    found = (read_record(folder)[0] for folder in run_folders(study_folder))
    return [record for record in found if record is not None]


def study_folders(runs: Path) -> list[Path]:
    """The studies that have a folder under `runs`."""
    return run_folders(runs)


def find_run(runs: Path, name: str) -> Path:
    """The run folder of a path, an id, or any unique part of an id."""
    path = Path(name)
    if (path.is_dir() and (path / "run.toml").exists()) or (path / "result.json").exists():
        return path
    every = [run for study in study_folders(runs) for run in run_folders(study)]
    exact = [run for run in every if run.name == name or f"{run.parent.name}/{run.name}" == name]
    found = exact or [run for run in every if name in f"{run.parent.name}/{run.name}"]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(f"{run.parent.name}/{run.name}" for run in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise ConfigError(f"run {name!r} could be {shown}{more}; give more of its name")
    known = {run.name for run in every}
    hint = nearest(name, known) if known else f"there are no runs under {runs}"
    raise ConfigError(f"run {name!r}: no such run; {hint}")


def metrics(folder: Path, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl; the last part only unless `whole`. A line that is still being written is left out."""
    path = folder / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not whole and size > TAIL_BYTES:
                file.seek(size - TAIL_BYTES)
                file.readline()
            for raw in file:
                try:
                    line = json.loads(raw)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line
    except OSError:
        return


def folder_bytes(folder: Path) -> int:
    """What a folder holds on disk."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total
