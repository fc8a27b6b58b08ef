"""Runs as things to find, compare, take over, drop and pack. No torch here.

Refuses to touch a run that is being trained. What is dropped is listed before and recorded after.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.errors import BusyError, CheckpointError, ConfigError
from oelm.study.folder import FINISHED, Look, folder_bytes, look, read_record, run_folders
from oelm.train.folder import machine_error, strict_json, write_atomically
from oelm.train.run import Run
from oelm.values import load_toml


# What evidence reads; everything else of a run folder can be made again or is only needed to continue.
KEPT = (
    "run.toml",
    "environment.json",
    "training.log",
    "metrics.jsonl",
    "timing_stats.json",
    "result.json",
    "examples.json",
    "dropped.json",
)
MISSING = "(not there)"


def run_of(folder: Path) -> Run:
    """The run of a folder, from run.toml or else from its record."""
    path = folder / "run.toml"
    if path.is_file():
        return Run.read(load_toml(path), where=str(path))
    record, problem = read_record(folder)
    if record is None or not isinstance(record.get("run"), dict):
        raise CheckpointError(problem or f"{folder}: holds no run.toml and no result.json; is it a run folder?")
    return Run.read(record["run"], where=f"{folder}/result.json")


def flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{path}{key}.")
        else:
            result[f"{path}{key}"] = value
    return result


def find(runs: Path, words: tuple[str, ...], state: str | None = None) -> list[Look]:
    """Runs whose id or study holds every word; a word `key=value` asks for a setting (optimizer.lr=0.001)."""
    asked = [word.partition("=") for word in words if "=" in word]
    plain = [word for word in words if "=" not in word]
    result = []
    for folder in (run for study in run_folders(runs) for run in run_folders(study)):
        if not all(word in f"{folder.parent.name}/{folder.name}" for word in plain):
            continue
        seen = look(folder)
        if state is not None and seen.state != state:
            continue
        if asked and not _has(folder, asked):
            continue
        result.append(seen)
    return result


def _has(folder: Path, asked: list[tuple[str, str, str]]) -> bool:
    try:
        settings = flat(run_of(folder).model_dump(mode="json"))
    except (ConfigError, CheckpointError):
        return False
    return all(key in settings and _same(settings[key], value) for key, _, value in asked)


def _same(value: Any, text: str) -> bool:
    if isinstance(value, bool):
        return str(value).lower() == text.lower()
    if isinstance(value, int | float):
        try:
            return float(text) == float(value)
        except ValueError:
            return False
    return str(value) == text


def differences(one: Path, other: Path) -> list[tuple[str, Any, Any]]:
    """What differs between two runs' settings, by dotted key."""
    left, right = (flat(run_of(folder).identified()) for folder in (one, other))
    keys = sorted({*left, *right})
    return [
        (k, left.get(k, MISSING), right.get(k, MISSING)) for k in keys if left.get(k, MISSING) != right.get(k, MISSING)
    ]


def remove(folder: Path) -> int:
    """Delete a run folder; the bytes that this freed."""
    _refuse_active(folder)
    size = folder_bytes(folder)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise machine_error(error, folder, "removing a run") from None
    return size


def _refuse_active(folder: Path) -> None:
    if look(folder).state in ("running", "stalled"):
        raise BusyError(f"{folder}: is being trained; stop it first, or wait")


@dataclass(frozen=True)
class Archived:
    """What an archive took and what was dropped."""

    file: Path
    runs: int
    kept_bytes: int
    dropped: list[tuple[str, int]]  # path, bytes


def archive(folders: list[Path], file: Path, *, drop: bool = False, keep_best: bool = False) -> Archived:
    """Pack what evidence needs of finished runs into a .tar.gz; with `drop`, then delete the rest of their folders."""
    if file.exists():
        raise ConfigError(f"{file}: exists; choose another name with --to, or move it away")
    finished = [folder for folder in folders if look(folder).state in ("done", "diverged", "failed")]
    if not finished:
        raise ConfigError("no finished runs among those; `oelm runs ls` shows their states")
    kept = 0
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(draft, "w:gz") as packed:
            for folder in finished:
                for path in _kept(folder):
                    packed.add(path, arcname=f"{folder.parent.name}/{folder.name}/{path.name}", recursive=False)
                    kept += path.stat().st_size
        os.replace(draft, file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise machine_error(error, file, "writing the archive") from None
    over = [folder for folder in finished if look(folder).state in FINISHED]  # a failed run may still be continued
    dropped = [one for folder in over for one in drop_checkpoints(folder, keep_best=keep_best)] if drop else []
    return Archived(file, len(finished), kept, dropped)


def twin(folder: Path) -> Path | None:
    """A finished run of this name, and so of these settings, in the folder of another study."""
    for other in run_folders(folder.parent.parent):
        found = other / folder.name
        if other != folder.parent and found.is_dir() and look(found).state in FINISHED:
            return found
    return None


def adopt(folder: Path) -> Path | None:
    """Take over what evidence needs of the twin of a run that has not begun; the twin, or None when there is none."""
    found = None if folder.exists() else twin(folder)
    if found is None:
        return None
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        for path in _kept(found):
            shutil.copy2(path, draft / path.name)
        os.rename(draft, folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if folder.exists():  # another runner was quicker
            return None
        raise machine_error(error, folder, f"taking over {found}") from None
    return found


def _kept(folder: Path) -> Iterator[Path]:
    return (folder / name for name in KEPT if (folder / name).is_file())


def drop_checkpoints(folder: Path, *, keep_best: bool) -> list[tuple[str, int]]:
    """Delete a run's checkpoints, and leave a list of what they were in dropped.json."""
    _refuse_active(folder)
    place = folder / "checkpoints"
    best = (folder / "best").read_text().strip() if keep_best and (folder / "best").is_file() else ""
    gone = []
    for path in sorted(place.iterdir()) if place.is_dir() else []:
        if best and Path(best).name == path.name:
            continue
        gone.append((f"{folder.name}/checkpoints/{path.name}", folder_bytes(path) if path.is_dir() else 0))
        shutil.rmtree(path, ignore_errors=True)
    if gone:
        names = [*_dropped(folder), *({"path": name, "bytes": size} for name, size in gone)]
        write_atomically(folder / "dropped.json", strict_json(names, indent=1) + "\n")
    return gone


def _dropped(folder: Path) -> list[dict[str, Any]]:
    try:
        said = json.loads((folder / "dropped.json").read_bytes())
    except (OSError, ValueError):
        return []
    return said if isinstance(said, list) else []


def describe(folder: Path) -> dict[str, Any]:
    """One run for a person or a machine: state, settings, numbers."""
    seen = look(folder)
    record = seen.record or {}
    return {
        "run": f"{folder.parent.name}/{folder.name}",
        "folder": str(folder),
        "state": seen.state,
        "problem": seen.problem or record.get("error"),
        "settings": flat(run_of(folder).model_dump(mode="json", exclude_none=True)),
        "metrics": record.get("metrics"),
        "params": record.get("params"),
        "data": record.get("data"),
        "cost": record.get("cost"),
        "environment": record.get("environment"),
        "bytes": folder_bytes(folder),
        "dropped": _dropped(folder),
    }
