"""Writing to disk so that a kill, a full disk or a second process leaves nothing half-written.

Owns locks, atomic files and what a failing disk is called. Knows nothing of data sets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from oelm.errors import BusyError, MachineError


@contextlib.contextmanager
def saving(folder: Path, named: str = "OELM_HOME") -> Iterator[None]:
    """A failing disk as one line; `named` is how the user says where to write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        remedy = {
            errno.ENOSPC: f"free some space, or name another disk with {named}; the same command continues",
            errno.EDQUOT: f"the quota is used up: name another disk with {named}",
            errno.EROFS: f"it is read-only: name another folder with {named}",
        }.get(error.errno or 0, f"check its permissions, or name another folder with {named}")
        raise MachineError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); {remedy}"
        ) from None


@contextlib.contextmanager
def held(folder: Path, key: str, *, wait: bool, patience: float = 3600.0) -> Iterator[None]:
    """One process at a time: the lock dies with its holder."""
    path = folder / f".{key}.lock"
    with open(path, "a+") as file:
        begun = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                if not wait or time.monotonic() - begun > patience:
                    raise BusyError(
                        f"{folder / key}: process {holder} is preparing this store; wait for it, then run again"
                    ) from None
                time.sleep(0.2)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def write_file(path: Path, data: npt.NDArray[Any] | bytes) -> str:
    """Write beside, flush to the disk, rename; the SHA-256 of what was written."""
    beside = path.with_name(path.name + ".new")
    raw = data if isinstance(data, bytes) else data.tobytes()
    try:
        with open(beside, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return hashlib.sha256(raw).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
