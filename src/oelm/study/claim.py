"""Who runs a row: claim files that two runners, or two machines on one file system, cannot both win. No torch here.

A claim is `.claims/<run id>.<n>`, made with O_EXCL; the highest n holds. A claim whose holder is gone (its process on
this machine, or its heartbeat elsewhere) is taken over by making n + 1: of two takers one wins, and the old holder,
should it wake, sees the higher number and stops. Renaming or deleting another's claim would race; making one does not.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


FOLDER = ".claims"
BEAT = 10.0  # seconds between the holder's heartbeats
GONE = 90.0  # seconds without one after which a holder on another machine is gone


@dataclass(frozen=True)
class Claim:
    """A claim as it stands in its file."""

    path: Path
    number: int
    host: str
    pid: int
    machine: str
    started: str
    age: float  # seconds since its last heartbeat
    held_for: float
    token: str

    @property
    def alive(self) -> bool:
        """Whether its holder is still there: by process on this machine, by heartbeat elsewhere."""
        if self.machine == machine_identity():
            return self.started == process_start(self.pid)
        return self.age < GONE


def machine_identity() -> str:
    """This boot of this machine and this process table: where a process id means something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        table = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, table = "unknown", ""
    return f"{socket.gethostname()}/{boot}/{table}"


def process_start(pid: int) -> str:
    """When a process began, in the kernel's clock: a process id that is used again has another. Empty when gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _now(folder: Path) -> float:
    """The file system's time: heartbeats are read against it, so that two machines' clocks need not agree."""
    probe = folder / f".now-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        probe.unlink(missing_ok=True)


def holder(study_folder: Path, run: str) -> Claim | None:
    """The claim on a run that counts: the highest number. None when nobody has one."""
    folder = study_folder / FOLDER
    best: tuple[int, Path] | None = None
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return None
    for name in names:
        stem, _, number = name.rpartition(".")
        if stem == run and number.isdigit() and (best is None or int(number) > best[0]):
            best = (int(number), folder / name)
    return None if best is None else _read(best[1], best[0])


def _read(path: Path, number: int) -> Claim | None:
    try:
        touched = path.stat().st_mtime
        data: dict[str, Any] = json.loads(path.read_bytes() or b"{}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        touched, data = time.time(), {}
    now = time.time()
    return Claim(
        path,
        number,
        host=str(data.get("host", "?")),
        pid=int(data.get("pid", 0)),
        machine=str(data.get("machine", "")),
        started=str(data.get("started", "")),
        age=max(0.0, now - touched),
        held_for=max(0.0, now - float(data.get("since", touched))),
        token=str(data.get("token", "")),
    )


def take(study_folder: Path, run: str) -> Held | None:
    """The claim on a run, or None when a living holder has it."""
    folder = study_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    present = holder(study_folder, run)
    if present is not None and present.machine != machine_identity() and present.age >= GONE / 2:
        present = _aged(present, _now(folder))
    if present is not None and present.alive:
        return None
    number = present.number + 1 if present else 1
    path = folder / f"{run}.{number}"
    token = secrets.token_hex(8)
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": machine_identity(),
        "started": process_start(os.getpid()),
        "since": time.time(),
        "token": token,
    }
    # written aside and linked: a claim is never seen half written, and link, like O_EXCL, fails when the name exists
    draft = folder / f".{run}.{token}"
    try:
        draft.write_text(json.dumps(content))
        os.link(draft, path)
    except FileExistsError:
        return None
    finally:
        draft.unlink(missing_ok=True)
    held = Held(study_folder, run, path, number, token)
    return held if held.mine() else None


def _aged(claim: Claim, now: float) -> Claim:
    try:
        return replace(claim, age=max(0.0, now - claim.path.stat().st_mtime))
    except OSError:
        return claim


@dataclass(frozen=True)
class Held:
    """A claim that this process holds."""

    study_folder: Path
    run: str
    path: Path
    number: int
    token: str

    def beat(self) -> bool:
        """Say that the holder lives; False when the claim has been taken over."""
        try:
            os.utime(self.path)
        except OSError:
            return False
        return self.mine()

    def mine(self) -> bool:
        """Whether this is still the claim that counts."""
        now = holder(self.study_folder, self.run)
        return now is not None and now.number == self.number and now.token == self.token

    def release(self) -> None:
        """Give it back, with the older ones that it replaced (those first: the highest number must go last)."""
        for number in range(max(1, self.number - 8), self.number + 1):
            (self.study_folder / FOLDER / f"{self.run}.{number}").unlink(missing_ok=True)
