"""Where a data set's files are: a folder of the user's, ../shared/data, the Hugging Face cache, the hub; in that order.

Owns `DataSet` (one row of the tables in corpora.py and tasks.py), the search, and what is said of what was found
(real or partial, by the official counts). Refuses to guess: when nothing is found the error names the folder layout.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from oelm.data import hub, reading
from oelm.errors import DataError, MachineError


Status = Literal["real", "partial", "demo", "synthetic"]
SPLITS = ("train", "validation", "test")
_WHOLE_HASH = 1 << 30  # source files up to this size in all are hashed whole, larger ones at both ends


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Files of a data set under a data folder: which files make which split, and which column has which role."""

    files: Mapping[str, tuple[str, ...]]  # split -> patterns below the data folder; {name} is the data set's
    columns: Mapping[str, str] = field(default_factory=lambda: {"text": "text"})  # role -> column
    only: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # split -> (column, value) of its rows
    official: Mapping[str, int] = field(default_factory=dict)  # rows by split, where they are not the set's own
    partial: bool = False  # known not to be the whole set
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Hub:
    """The same on the hub. Script data sets are dead: a Parquet repository, or its Parquet revision."""

    id: str
    config: str | None = None
    revision: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {s: s for s in SPLITS})
    columns: Mapping[str, str] = field(default_factory=lambda: {"text": "text"})
    stream: bool = False  # too large to keep: read as it comes
    rows: int | None = None  # read only so many training rows
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set: a row of a table."""

    name: str
    kind: Literal["lm", "classify", "tag", "qa"]
    title: str
    licence: str
    layouts: tuple[Layout, ...] = ()
    hub: Hub | None = None
    official: Mapping[str, int] = field(default_factory=dict)  # rows of the whole set by split
    labels: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # roles that a file may lack
    carve: Mapping[str, float] = field(default_factory=dict)  # splits taken from train by hash, and their share
    note: str = ""

    def everywhere(self) -> tuple[Layout, ...]:
        """The known layouts, then the general one: a folder of the data set's name with a file or more a split."""
        columns = self.hub.columns if self.hub else {"text": "text"}
        general = Layout(files={split: _patterns(f"{self.name}/", split) for split in SPLITS}, columns=columns)
        return (*self.layouts, general)

    def expected(self) -> str:
        """The folder layout that would be read, for messages."""
        suffix = "parquet" if self.kind != "lm" else "parquet|jsonl|txt"
        needed = [
            s for s in SPLITS if s not in self.carve and (not self.official or s in self.official or s == "train")
        ]
        return f"{self.name}/{{{','.join(needed)}}}.{suffix}" if len(needed) > 1 else f"{self.name}/train.{suffix}"


def _patterns(prefix: str, split: str) -> tuple[str, ...]:
    names = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}[split]
    return tuple(
        f"{prefix}{folder}{name}{rest}"
        for folder in ("", "data/")
        for name in names
        for rest in (".*", "-[0-9]*.*", "/*.*")
    )


class Found(Protocol):
    """A data set somewhere, ready to be read."""

    @property
    def dataset(self) -> DataSet:
        """Its row of the table."""

    @property
    def place(self) -> str:
        """folder, shared, cache, hub, package or local."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have files, in the order train, validation, test."""

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """The rows of a split keyed by role, in the order of the files."""

    def documents(self, split: str) -> Iterator[reading.Piece]:
        """The text of a split in pieces (language modelling)."""

    def counts(self) -> dict[str, int | None]:
        """Rows by split where a look at the files tells them."""

    def identity(self) -> str:
        """Changes when the files change."""

    def describe(self) -> dict[str, Any]:
        """Where it came from and whether it is the whole set: part of the provenance."""


@dataclass(frozen=True, kw_only=True)
class FilesFound:
    """A data set in files on this machine."""

    dataset: DataSet
    place: str
    root: Path
    files: Mapping[str, tuple[Path, ...]]
    layout: Layout

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if self.files.get(split))

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        only = self.layout.only.get(split)
        columns = dict(self.layout.columns) | ({"only": only[0]} if only else {})
        for path in self.files[split]:
            for row in reading.rows(path, columns, optional=self.dataset.optional):
                if only is None or row.pop("only") == only[1]:
                    yield row

    def documents(self, split: str) -> Iterator[reading.Piece]:
        for path in self.files[split]:
            yield from reading.documents(path, self.layout.columns["text"])

    def counts(self) -> dict[str, int | None]:
        if self.layout.only:
            return dict.fromkeys(self.splits)
        return {split: _total(reading.count(path) for path in self.files[split]) for split in self.splits}

    def identity(self) -> str:
        return self._identity

    @cached_property
    def _identity(self) -> str:
        paths = [(split, path) for split in self.splits for path in self.files[split]]
        digest = hashlib.sha256()
        try:
            sizes = [path.stat().st_size for _, path in paths]
            for (split, path), size in zip(paths, sizes, strict=True):
                digest.update(f"{split}\0{path.name}\0{size}\0".encode())
                digest.update(_content(path, size, whole=sum(sizes) <= _WHOLE_HASH))
        except OSError as error:
            raise MachineError(
                f"{error.filename or self.root}: cannot be read ({error.strerror or error}); check its permissions"
            ) from None
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        counts = self.counts()
        status, note = judged(self.dataset, counts, partial=self.layout.partial)
        return {
            "status": status,
            "place": self.place,
            "from": [_short(path, self.root) for split in self.splits for path in self.files[split]],
            "licence": self.dataset.licence,
            "rows": counts,
            "note": "; ".join(part for part in (self.layout.note, note, self.dataset.note) if part),
        }


@dataclass(frozen=True, kw_only=True)
class HubFound:
    """A data set of the hub, read through `datasets`: out of its cache, or fetched."""

    dataset: DataSet
    place: str
    hub: Hub
    loaded: Mapping[str, Any]  # split -> datasets.Dataset or IterableDataset

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in self.loaded)

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        where = f"{self.hub.id} ({split})"
        limit = self.hub.rows if split == "train" else None
        coming, number = iter(self.loaded[split]), 0
        while limit is None or number < limit:
            try:
                row = next(coming)
            except StopIteration:
                return
            except Exception as error:  # a stream fails as its transport does
                raise MachineError(
                    f"{where}: reading stopped at row {number:,} ({hub.brief(error)}); run the same command again"
                ) from None
            yield reading.pick(row, self.hub.columns, frozenset(self.dataset.optional), where)
            number += 1

    def documents(self, split: str) -> Iterator[reading.Piece]:
        for row in self.rows(split):
            yield from reading.cut(row["text"])

    def counts(self) -> dict[str, int | None]:
        return {s: len(data) if hasattr(data, "__len__") else None for s, data in self.loaded.items()}

    def identity(self) -> str:
        prints = {split: str(getattr(data, "_fingerprint", "")) for split, data in self.loaded.items()}
        origin = (self.hub.id, self.hub.config, self.hub.revision, self.hub.rows)
        return hashlib.sha256(repr((origin, sorted(prints.items()))).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        counts = self.counts()
        status, note = judged(self.dataset, counts, partial=self.hub.rows is not None)
        return {
            "status": status,
            "place": self.place,
            "from": [f"{self.hub.id}" + (f" ({self.hub.config})" if self.hub.config else "")],
            "licence": self.dataset.licence,
            "rows": counts,
            "note": "; ".join(part for part in (self.hub.note, note, self.dataset.note) if part),
        }


def judged(
    dataset: DataSet,
    counts: Mapping[str, int | None],
    *,
    partial: bool = False,
    official: Mapping[str, int] | None = None,
    unit: str = "rows",
) -> tuple[Status, str]:
    """Real when every count that is known is the official one; else partial, and in what."""
    official = dataset.official if official is None else official
    off = [
        f"{split} has {counts[split]:,} of the official {wanted:,} {unit}"
        for split, wanted in official.items()
        if counts.get(split) is not None and counts[split] != wanted
    ]
    missing = [split for split in official if split not in counts]
    if missing:
        off.append(f"no {' and no '.join(missing)} split here")
    return ("partial" if partial or off else "real"), "; ".join(off)


def data_folders(folder: Path | str | None = None) -> list[tuple[str, Path]]:
    """The folders that are searched, in order, each with the word for its place."""
    places: list[tuple[str, Path]] = []
    if folder is not None:
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise DataError(f"{path}: no such folder; name the folder that holds the data sets")
        places.append(("folder", path))
    if named := os.environ.get("OELM_DATA"):
        path = Path(named).expanduser()
        if not path.is_dir():
            raise DataError(f"OELM_DATA={named}: no such folder; correct or unset it")
        places.append(("folder", path))
    shared = shared_folder()
    return [*places, ("shared", shared)] if shared else places


def shared_folder() -> Path | None:
    """`../shared/data` beside the current folder or beside the checkout."""
    checkout = Path(__file__).resolve().parents[3]
    for base in (Path.cwd(), checkout):
        path = (base / ".." / "shared" / "data").resolve()
        if path.is_dir():
            return path
    return None


def find_local(dataset: DataSet, folder: Path | str | None = None) -> FilesFound | None:
    """The data set in the folders, or None."""
    for place, root in data_folders(folder):
        for layout in dataset.everywhere():
            files = {split: match(root, patterns, dataset.name) for split, patterns in layout.files.items()}
            if all(files.get(split) for split in ("train",) if "train" in layout.files) and any(files.values()):
                row = replace(dataset, official=layout.official) if layout.official else dataset
                return FilesFound(dataset=row, place=place, root=root, files=files, layout=layout)
        if folder is not None and place == "folder" and root == Path(folder).expanduser():
            raise DataError(f"{root}: has no data set {dataset.name!r}; expected {root}/{dataset.expected()}")
    return None


def find(dataset: DataSet, folder: Path | str | None = None) -> Found:
    """The data set in the first place that has it, or a DataError that says where it was looked for."""
    found = find_local(dataset, folder) or find_hub(dataset)
    if found is None:
        looked = [str(path) for _, path in data_folders(folder)]
        raise DataError(
            f"data set {dataset.name!r} is not on this machine and the hub "
            f"{'is switched off (HF_HUB_OFFLINE)' if hub.offline() else 'cannot be reached'}"
            f" (looked in {', '.join([*looked, 'the Hugging Face cache'])}): put {dataset.expected()} into a folder "
            f"and name it with --folder or OELM_DATA"
        )
    return found


def match(root: Path, patterns: Iterable[str], name: str) -> tuple[Path, ...]:
    """The readable files of the first pattern that has any, in the order of their names."""
    for pattern in patterns:
        found = sorted(
            path for path in root.glob(pattern.format(name=name)) if path.is_file() and reading.readable(path)
        )
        if found:
            return tuple(found)
    return ()


def find_hub(dataset: DataSet) -> HubFound | None:
    """The data set out of the Hugging Face cache or off the hub; None when neither has it."""
    if dataset.hub is None:
        return None
    # Looking first spares a machine that has nothing the seconds that importing `datasets` takes.
    cached = hub.load(dataset.hub, fetch=False) if hub.in_cache(dataset.hub.id) else {}
    if cached:
        return HubFound(dataset=dataset, place="cache", hub=dataset.hub, loaded=cached)
    if hub.offline() or not hub.answers():
        return None
    return HubFound(dataset=dataset, place="hub", hub=dataset.hub, loaded=hub.load(dataset.hub, fetch=True))


def _total(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if any(value is None for value in known) else sum(value for value in known if value is not None)


def _content(path: Path, size: int, *, whole: bool) -> bytes:
    with open(path, "rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").digest()
        ends = file.read(1 << 20)
        file.seek(max(0, size - (1 << 20)))
        return hashlib.sha256(ends + file.read(1 << 20)).digest()


def _short(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def local_files(path: Path | str, columns: Mapping[str, str], kind: Any) -> FilesFound:
    """A file or folder of the user's as a data set of the name `local`."""
    root = Path(path).expanduser()
    if len(root.name) > 255 or "\0" in str(root):
        raise DataError(f"{str(root)[:60]!r}…: is no path; check path")
    dataset = DataSet(name="local", kind=kind, title="files of the user's", licence="the user's")
    if root.is_file():
        if not reading.readable(root):
            raise DataError(f"{root}: cannot be read as data; give .txt, .jsonl, .csv or .parquet (also .xz or .gz)")
        layout = Layout(files={"train": (root.name,)}, columns=columns)
        return FilesFound(dataset=dataset, place="local", root=root.parent, files={"train": (root,)}, layout=layout)
    if not root.exists():
        raise DataError(f"{root}: no such file or folder; check path")
    layout = Layout(files={split: (*_saved(split), *_patterns("", split)) for split in SPLITS}, columns=columns)
    files = {split: match(root, patterns, "local") for split, patterns in layout.files.items()}
    if not files["train"]:
        single = sorted(p for p in root.iterdir() if p.is_file() and reading.readable(p) and not _is_note(p))
        if not single or any(files.values()):
            raise DataError(
                f"{root}: has no training files; expected train.parquet, train.jsonl, train.csv or train.txt"
            )
        files = {"train": tuple(single)}
    return FilesFound(dataset=dataset, place="local", root=root, files=files, layout=layout)


def _saved(split: str) -> tuple[str, ...]:
    """What `datasets` writes with save_to_disk."""
    return (f"{split}/data-*.arrow",)


def _is_note(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in ("readme*", "license*", "licence*"))
