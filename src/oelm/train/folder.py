"""The folder of a run: one process at a time, atomic files, an append-only log of metrics, a heartbeat.

Refuses a folder that another process holds (BusyError) or that belongs to another run (CheckpointError).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from oelm.errors import BusyError, CheckpointError, ConfigError, MachineError, OelmError
from oelm.train.run import Run
from oelm.values import load_toml


HEARTBEAT_SECONDS = 5.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def machine_error(error: OSError, path: Path, doing: str) -> MachineError:
    """One line about a disk that is full, read-only, gone or broken."""
    if error.errno in _FULL:
        return MachineError(f"{doing}: disk full: {path} ({_free(path)}); free space and run the same command again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return MachineError(f"{doing}: cannot write {path} ({error.strerror}); choose another folder with --out")
    return MachineError(
        f"{doing}: {path}: {error.strerror or type(error).__name__}; check the disk and run the same command again"
    )


def _free(path: Path) -> str:
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{os.statvfs(place).f_bavail * os.statvfs(place).f_frsize / 1e6:,.1f} MB free"
    return "free space unknown"


def fsync_folder(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """The whole new text or the whole old one, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise machine_error(error, path, "writing") from None


def strict_json(data: Any, *, indent: int | None = None) -> str:
    """JSON without NaN: what is not finite becomes null."""
    return json.dumps(finite(data), indent=indent, allow_nan=False)


def finite(data: Any) -> Any:
    """The same plain data, with every number that is not finite replaced by None."""
    if isinstance(data, Mapping):
        return {str(k): finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [finite(v) for v in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data


def run_toml(run: Run) -> str:
    """The complete run as TOML; what is None has no form there and is left out."""
    import tomllib

    text = "".join(_table(run.model_dump(), ()))
    assert Run.read(tomllib.loads(text), where="run.toml") == run, (
        "run.toml does not read back as the run it was written from"
    )
    return text


def _table(data: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(json.dumps(p) if not p.isidentifier() else p for p in path)}]\n"
    for key, value in data.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{key if key.isidentifier() else json.dumps(key)} = {_scalar(value)}\n"
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _table(value, (*path, key))


def _scalar(value: Any) -> str:
    """JSON's form of strings, numbers, booleans and lists of them is TOML's too (with DEL escaped)."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


class RunFolder:
    """One run's folder, locked while this object is open."""

    def __init__(self, path: Path, run: Run, *, first: bool = True) -> None:
        self.path = path.absolute()
        self.run = run
        self.first = first  # of several processes, one holds the folder and writes
        self._lock: int | None = None
        self._metrics: IO[str] | None = None
        self._beat = 0.0

    def __enter__(self) -> RunFolder:
        if not self.first:
            return self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"{self.path}: is a file, not a folder; choose another with --out") from None
        except OSError as error:
            raise machine_error(error, self.path, "opening the run folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 200, 0).decode("utf-8", "replace").strip() or "another process"
            os.close(self._lock)
            self._lock = None
            raise BusyError(f"{self.path}: in use by {holder}; wait for it, or stop it first") from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
            self._claim()
        except OSError as error:
            self.__exit__()
            raise machine_error(error, self.path, "opening the run folder") from None
        except OelmError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            os.close(self._lock)  # the kernel frees the lock, at death too
            self._lock = None

    def _claim(self) -> None:
        """Write run.toml, or refuse the folder of another run."""
        file = self.path / "run.toml"
        if file.exists():
            there = Run.read(load_toml(file), where=str(file))
            if there.identity() != self.run.identity():
                key, old, new = next(_differences(there.identified(), self.run.identified()))
                raise CheckpointError(
                    f"{self.path}: holds another run ({key} is {old!r} there, {new!r} here); choose another folder with --out"
                )
        else:
            write_atomically(file, run_toml(self.run))

    def result(self) -> dict[str, Any] | None:
        """The result of a run that is over for good (done or diverged), if it is."""
        try:
            found = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        over = isinstance(found, dict) and found.get("status") in ("done", "diverged")
        return found if over else None

    def write(self, name: str, data: Any) -> None:
        """A JSON file of the folder, replaced as a whole."""
        self.write_text(name, strict_json(data, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """A text file of the folder, replaced as a whole."""
        if self.first:
            write_atomically(self.path / name, text)

    def forget(self, name: str) -> None:
        """Remove a file of the folder, if it is there."""
        if not self.first:
            return
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).unlink()

    # -- metrics.jsonl

    def open_metrics(self, lines: int) -> None:
        """Open the log for appending, cut back to its first `lines`: what came later happens again, a torn line goes."""
        if not self.first:
            return
        path = self.path / "metrics.jsonl"
        try:
            raw = path.read_bytes() if path.exists() else b""
            kept = b"".join(line for line in raw.splitlines(keepends=True)[:lines] if line.endswith(b"\n"))
            if kept != raw:
                write_atomically(path, kept.decode("utf-8", "replace"))
            self._metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed with the folder
        except OSError as error:
            raise machine_error(error, path, "opening the log of metrics") from None

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._metrics is None:
            return
        try:
            self._metrics.write(strict_json(line) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise machine_error(error, self.path / "metrics.jsonl", "logging") from None

    def sync_metrics(self) -> None:
        """Before a checkpoint: what it presupposes must be on disk."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._metrics.fileno())

    def beat(self, **says: Any) -> None:
        """Touch the heartbeat, at most every few seconds; a failure here never stops a run."""
        now = time.monotonic()
        if not self.first:
            return
        if now - self._beat < HEARTBEAT_SECONDS:
            return
        self._beat = now
        temporary = self.path / ".heartbeat.tmp"
        with contextlib.suppress(OSError):
            temporary.write_text(
                strict_json({"time": time.time(), "pid": os.getpid(), **says}) + "\n", encoding="utf-8"
            )
            os.replace(temporary, self.path / "heartbeat")


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif old != new:
        yield path, old, new
