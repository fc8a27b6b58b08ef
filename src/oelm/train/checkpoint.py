"""Checkpoints that survive a kill at any instant and are never trusted unread.

Written in a thread from a snapshot on the host: files into a temporary folder, each synced, the manifest of SHA-256s
last, then one rename to a name never used before, then the pointers. Reading verifies every byte before a tensor
is made, falls back to the checkpoint before with a warning, and never unpickles.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as tensors_format
from torch import Tensor, nn

from oelm import __version__
from oelm.errors import CheckpointError, FrozenWeightsChanged
from oelm.method.record import digest
from oelm.train.folder import fsync_folder, machine_error, strict_json, write_atomically
from oelm.train.parallel import World, put, stored


SCHEMA = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
SHARD = re.compile(r"(\w+)\.shard-")  # a file of one rank's part of `model`, `optimizer` or `extra`
_MANIFEST_LIMIT = 10_000_000

Files = Mapping[str, Mapping[str, Tensor]]


class Damaged(CheckpointError):
    """This checkpoint is not what was written; the one before may be."""


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: tensors by file and name, and the plain state."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    manifest: dict[str, Any]


# -- reading


def _read(path: Path, size: int | None = None) -> bytes:
    """A regular file's bytes; links, pipes and folders are refused without waiting for them."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror or type(error).__name__}") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise Damaged(f"{path}: is not a regular file")
    with open(handle, "rb") as file:
        if size is not None and found.st_size != size:
            raise Damaged(f"{path}: {found.st_size:,} bytes instead of {size:,}")
        if size is None and found.st_size > _MANIFEST_LIMIT:
            raise Damaged(f"{path}: {found.st_size:,} bytes are too many for a manifest")
        return file.read()


def _sealed(body: Mapping[str, Any]) -> str:
    """The manifest's text, its own hash included: one text for one content."""
    seal = hashlib.sha256(strict_json(body).encode()).hexdigest()
    return strict_json({**body, "sha256": seal}, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint folder, or Damaged."""
    raw = _read(path / MANIFEST)
    try:
        manifest = json.loads(raw.decode("ascii"))
        body = {k: v for k, v in manifest.items() if k != "sha256"}
        intact = _sealed(body).encode() == raw
    except (ValueError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise Damaged(f"{path / MANIFEST}: does not match its own hash")
    if body.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path}: written by oelm {body.get('oelm')} in form {body.get('schema')!r}, this is oelm {__version__} "
            f"(form {SCHEMA}); use the oelm that wrote it"
        )
    return body


def read_checkpoint(path: Path) -> Loaded:
    """One checkpoint, every byte verified before use; Damaged if any differs."""
    manifest = read_manifest(path)
    there = {entry.name for entry in os.scandir(path)} - {MANIFEST}
    if odd := sorted(there ^ set(manifest["files"])):
        raise Damaged(f"{path}: {odd[0]} is {'not in the manifest' if odd[0] in there else 'missing'}")
    tensors: dict[str, dict[str, Tensor]] = {}
    state: dict[str, Any] = {}
    shards: dict[str, list[Path]] = {}
    for name, entry in manifest["files"].items():
        raw = _read(path / name, entry["bytes"])
        if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
            raise Damaged(f"{path / name}: SHA-256 differs from the manifest's")
        try:
            if match := SHARD.match(name):
                shards.setdefault(match[1], []).append(path / name)
            elif name.endswith(".safetensors"):
                tensors[name.removesuffix(".safetensors")] = tensors_format.load(raw)
            elif name == "state.json":
                state = json.loads(raw)
        except (SafetensorError, ValueError) as error:
            raise Damaged(f"{path / name}: {error}") from None
    if shards:
        from oelm.train.shards import read_shards

        tensors |= {name: read_shards(files) for name, files in shards.items()}
    return Loaded(path, int(manifest["step"]), tensors, state, manifest)


def load_weights(folder: Path, which: str = "best") -> tuple[dict[str, Tensor], int]:
    """The model's tensors of a run folder's `best` or `latest` checkpoint, verified, and their step."""
    folder = Path(folder)
    try:
        target = (folder / which).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        raise CheckpointError(f"{folder}: has no {which!r} checkpoint; train the run first") from None
    if not re.fullmatch(r"checkpoints/" + _NAME.pattern, target):
        raise CheckpointError(f"{folder / which}: {target[:80]!r} is no checkpoint's name; run the training again")
    try:
        loaded = read_checkpoint(folder / target)
    except Damaged as error:
        other = "latest" if which == "best" else "best"
        raise CheckpointError(
            f"{error}; the {which} checkpoint is damaged: use the {other} one or train again"
        ) from None
    return loaded.tensors["model"], loaded.step


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path, skip: Collection[str] = ()) -> None:
    """Write a checkpoint's tensors into a model that the run's variant was applied to; every name must fit.

    skip: the names that a compact checkpoint leaves out.
    """
    there = stored(model, skip)
    if odd := sorted(set(there) ^ set(weights)):
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise CheckpointError(f"{path}: does not fit the model ({odd[0]}{more}); was it written by another run?")
    for name, target in there.items():
        value = weights[name]
        if value.shape != target.shape or value.dtype != target.dtype:
            raise CheckpointError(
                f"{path}: {name} is {value.dtype} {list(value.shape)} there, "
                f"{target.dtype} {list(target.shape)} in the model; was it written by another run?"
            )
    with torch.no_grad():
        for name, target in there.items():
            put(target, weights[name])


# -- writing


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host; copies from a GPU are queued on its stream and must be waited for."""
    return {
        name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t.detach(), non_blocking=True)
        if t.is_cuda
        else t.detach().clone(memory_format=torch.contiguous_format)
        for name, t in tensors.items()
    }


@dataclass(frozen=True)
class _Job:
    """One save, as the writer gets it."""

    step: int
    files: Files
    state: Mapping[str, Any]
    best: bool
    check: Callable[[], None]
    frozen: Mapping[str, str]
    copied: Any  # a CUDA event, or None: the files are on the host when it has happened


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: str,
        fingerprint: str | None,
        world: World,
        keep_last: int = 2,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder = folder
        self.root = folder / "checkpoints"
        self.identity = identity
        self.fingerprint = fingerprint
        self.keep_last = max(1, keep_last)
        self.say = say
        self.world = world
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="oelm-save")
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """Wait for a save that is under way, without raising what it raised."""
        self._writer.shutdown(wait=True)

    def sweep(self) -> None:
        """Remove what killed saves left behind. The run folder's lock is held by the caller."""
        for entry in self._entries():
            if entry.name.endswith(".tmp"):
                shutil.rmtree(entry.path, ignore_errors=True)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as found:
            yield from (e for e in found if e.is_dir(follow_symlinks=False))

    def known(self) -> list[Path]:
        """Checkpoint folders, the newest first; not verified."""
        found = []
        for entry in self._entries():
            if match := _NAME.fullmatch(entry.name):
                found.append((int(match[1]), int(match[2] or 0), Path(entry.path)))
        return [path for _, _, path in sorted(found, reverse=True)]

    def load(self) -> Loaded | None:
        """The newest checkpoint that verifies, None if there is none at all; says aloud what it passes over."""
        candidates = self.known()
        refused: list[str] = []
        for path in candidates:
            try:
                found = read_checkpoint(path)
            except Damaged as error:
                refused.append(str(error))
                self.say(f"warning: damaged checkpoint refused: {error}; using the one before")
                continue
            self._own(found)
            return found
        if refused:
            raise CheckpointError(
                f"{self.root}: none of {len(refused)} checkpoints is intact ({refused[0]}); remove the folder to start again"
            )
        return None

    def _own(self, found: Loaded) -> None:
        if found.manifest["run"] != self.identity:
            raise CheckpointError(
                f"{found.path}: is of run {found.manifest['run']}, this is {self.identity}; choose another folder with --out"
            )
        if found.manifest["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{found.path}: was trained on data {found.manifest['fingerprint']}, the data now is {self.fingerprint}; "
                "bring the old data back or choose another folder with --out"
            )

    def save(
        self,
        step: int,
        files: Files,
        state: Mapping[str, Any],
        *,
        best: bool = False,
        check: Callable[[], None] = lambda: None,
        frozen: Mapping[str, str] | None = None,
    ) -> None:
        """Snapshot the tensors and queue the writing; waits for the save before it, `wait` waits for this one.

        check: called by the writer before anything is written. frozen: what tensors of the file "model" must hash to;
        a difference raises FrozenWeightsChanged and nothing is written. Sharded tensors are written at once, by all ranks.
        """
        self.wait()
        if self.world.sharded:
            self._save_sharded(_Job(step, files, dict(state), best, check, {}, None))
        elif self.world.first:
            copies = {name: snapshot(tensors) for name, tensors in files.items()}
            copied = None
            if self.world.device.type == "cuda":
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            self._pending = self._writer.submit(
                self._save, _Job(step, copies, dict(state), best, check, frozen or {}, copied)
            )

    def step_back(self, step: int) -> bool:
        """Make the newest checkpoint that is not after `step` the latest one; False when there is none."""
        older = [path.name for path in self.known() if _step_of(path.name) <= step]
        found = self.world.told(older[0] if older else "")
        if found and self.world.first:
            self._point("latest", found)
        return bool(found)

    def mend_pointers(self, found: Loaded, best: int | None) -> None:
        """What is resumed from is the latest, and the best is of step `best`: a kill or damage may have left other names."""
        self._point("latest", found.path.name)
        if best is not None and best not in {_step_of(name) for name in self._pointed("best")}:
            there = [found.path, *self.known()]
            for path in there:
                if _step_of(path.name) == best:
                    self._point("best", path.name)
                    return

    def _point(self, which: str, name: str) -> None:
        if self._pointed(which) != {name}:
            write_atomically(self.folder / which, f"checkpoints/{name}\n")

    def poll(self) -> None:
        """Raise what a finished save raised; never waits."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way; raises what it raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _save(self, job: _Job) -> None:
        """The protocol, in the writer's thread."""
        if job.copied is not None:
            job.copied.synchronize()
        job.check()
        for name, wanted in job.frozen.items():
            found = job.files["model"].get(name)
            if found is not None and digest(found) != wanted:
                raise FrozenWeightsChanged(
                    f"{name}: frozen, and not what it was when it was frozen (at step {job.step}); nothing was saved"
                )
        temporary = self._temporary(job.step)
        try:
            self.root.mkdir(exist_ok=True)
            temporary.mkdir()
            entries = {}
            for name, tensors in job.files.items():
                entries[f"{name}.safetensors"] = _put(
                    temporary / f"{name}.safetensors", tensors_format.save(dict(tensors))
                )
            self._seal(temporary, job, entries)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise machine_error(error, self.root, f"saving step {job.step}") from None
        self._prune()

    def _save_sharded(self, job: _Job) -> None:
        """The same by all ranks together: DCP writes each rank's shards as safetensors, the first rank seals them."""
        from oelm.train.shards import write_shards

        job.check()
        temporary = self._temporary(0).with_name(self.world.told(self._temporary(job.step).name))
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            self.world.barrier()
            for name, tensors in job.files.items():
                write_shards(temporary, name, tensors)
            self.world.barrier()
            if self.world.first:
                entries = {path.name: _hashed(path) for path in sorted(temporary.iterdir())}
                self._seal(temporary, job, entries)
                self._prune()
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise machine_error(error, self.root, f"saving step {job.step}") from None
        self.world.barrier()

    def _temporary(self, step: int) -> Path:
        return self.root / f"step-{step}.{secrets.token_hex(4)}.tmp"

    def _seal(self, temporary: Path, job: _Job, entries: dict[str, Any]) -> None:
        """State, manifest, rename, pointers; only then is the checkpoint said to be there."""
        entries["state.json"] = _put(temporary / "state.json", strict_json(job.state).encode())
        _put(temporary / MANIFEST, _sealed(self._manifest(job.step, entries)).encode())
        fsync_folder(temporary)
        final = self._rename(temporary, job.step)
        fsync_folder(self.root)
        self._point("latest", final.name)
        if job.best:
            self._point("best", final.name)
        self.say(f"checkpoint step={job.step} saved")

    def _manifest(self, step: int, entries: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "step": step,
            "run": self.identity,
            "fingerprint": self.fingerprint,
            "oelm": __version__,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "files": dict(entries),
        }

    def _rename(self, temporary: Path, step: int) -> Path:
        """To a name never used before: a folder cannot be replaced atomically."""
        used = [int(m[2] or 0) for p in self.known() if (m := _NAME.fullmatch(p.name)) and int(m[1]) == step]
        final = self.root / (f"step-{step}.{max(used) + 1}" if used else f"step-{step}")
        os.rename(temporary, final)
        return final

    def _pointed(self, *pointers: str) -> set[str]:
        names = set()
        for which in pointers:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                names.add((self.folder / which).read_text(encoding="utf-8").strip().removeprefix("checkpoints/"))
        return names

    def _prune(self) -> None:
        """Keep the newest few and the best; what goes is renamed first, so that no half of it is ever read."""
        keep = self._pointed("latest", "best")
        for path in self.known()[self.keep_last :]:
            if path.name in keep:
                continue
            doomed = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
            with contextlib.suppress(OSError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _step_of(name: str) -> int:
    """The step in a checkpoint's name; -1 for what is no such name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1


def _put(path: Path, raw: bytes) -> dict[str, Any]:
    """Write one new file and wait until it is on the disk; its entry in the manifest."""
    with open(path, "xb", buffering=0) as file:
        view = memoryview(raw)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def _hashed(path: Path) -> dict[str, Any]:
    """The entry of a file that another library wrote, once it is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def disk_room(folder: Path, needed: int) -> str | None:
    """A warning when the disk has less room than two checkpoints need."""
    free = shutil.disk_usage(folder).free
    if free < 2 * needed:
        return f"{folder}: {free / 1e6:,.0f} MB free, two checkpoints need {2 * needed / 1e6:,.0f} MB; free space"
    return None
