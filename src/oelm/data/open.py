"""The one door to data: `load(spec)` gives batches of any data set, prepared on first use where that is needed.

Owns which kind of source a name means. A source's interface is the same for all kinds (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from oelm.data import carving, corpora, disk, hub, parcel, sources
from oelm.data.prepare import Report, Wanted, prepared
from oelm.data.sources import DataSet, Found
from oelm.data.spec import DataSpec
from oelm.data.store import Damaged, Index, Store, open_store, stores, stores_folders
from oelm.data.tokens import load_tokens, train_bpe
from oelm.data.windows import LmSource
from oelm.errors import ConfigError, DataError, nearest


class Source(Protocol):
    """What training and evaluation read. Batches are dicts of numpy arrays."""

    kind: str
    name: str
    vocab_size: int
    pad_id: int
    labels: tuple[str, ...]

    @property
    def fingerprint(self) -> str: ...

    @property
    def provenance(self) -> dict[str, Any]: ...

    @property
    def train_size(self) -> int: ...

    def steps_per_epoch(self, batch: int) -> int: ...

    def train_batch(self, *, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> dict[str, Any]: ...

    def eval_batches(self, split: str, batch: int) -> Iterator[dict[str, Any]]: ...

    def score(self, split: str, outputs: Any) -> dict[str, Any]: ...


def load(
    spec: DataSpec,
    *,
    folder: Path | str | None = None,
    report: Report | None = None,
    wait: bool = True,
    repair: bool = False,
) -> Any:
    """The data of a run, ready to be read; `folder` is searched before all other places.

    `report(split, done, more)` is told how preparation goes; `wait` for another process that prepares the same data.
    A damaged store is refused (`Damaged`), or made again with `repair`.
    """
    if kind_of(spec) == "lm":
        return load_lm(spec, folder=folder, report=report, wait=wait, repair=repair)
    from oelm.data.tasks import open_task

    return open_task(spec, folder=folder, progress=report, wait=wait)


def kind_of(spec: DataSpec) -> str:
    """lm, classify, tag, qa or recall."""
    if spec.name == "local":
        return str(spec.task)
    if spec.name in corpora.CORPORA:
        return "lm"
    if spec.name == "recall":
        return "recall"
    from oelm.data.tasks import TASKS

    if spec.name in TASKS:
        return str(TASKS[spec.name].kind)
    raise ConfigError(f"data set {spec.name!r} is unknown; {nearest(spec.name, names())}")


def names() -> list[str]:
    """Every data set by name."""
    from oelm.data.tasks import TASKS

    return [*corpora.CORPORA, *TASKS, "recall", "local"]


def load_lm(
    spec: DataSpec,
    *,
    folder: Path | str | None = None,
    report: Report | None = None,
    wait: bool = True,
    repair: bool = False,
) -> LmSource:
    """A corpus as windows: from a store that fits, else prepared from the text."""
    if spec.examples is not None:
        raise ConfigError(f"data.examples: {spec.name} is read in tokens; use tokens")
    return LmSource(spec, store_of(spec, folder=folder, report=report, wait=wait, repair=repair))


def store_of(
    spec: DataSpec,
    *,
    folder: Path | str | None = None,
    report: Report | None = None,
    wait: bool = True,
    repair: bool = False,
) -> Store:
    """The store of a corpus.

    The text decides when it is on this machine: another version of it is another store. Where there is only a store,
    the largest that has enough tokens is read.
    """
    found = found_locally(spec, folder)
    try:
        if found is None:
            store = _largest(spec)
            if store is not None:
                return store
            found = sources.find(corpora.CORPORA[spec.name], folder)
        tokens = load_tokens(spec.tokenizer, folder)
    except DataError as error:
        return _instead(spec, error)
    wanted = Wanted(found=found, tokens=tokens, seed=spec.seed)
    if spec.tokens is not None and wanted.key not in {path.name for path, _ in stores()}:
        wanted = replace(wanted, limit=spec.tokens)
    return prepared(wanted, report=report, wait=wait, repair=repair)


def found_locally(spec: DataSpec, folder: Path | str | None) -> Found | None:
    """The text of a corpus on this machine, without asking the hub or its cache."""
    if spec.name == "local":
        return sources.local_files(spec.path or "", {"text": "text"} | spec.columns, spec.task)
    if spec.name == "demo":
        return corpora.DemoFound()
    return sources.find_local(corpora.CORPORA[spec.name], folder)


def train_tokenizer(spec: DataSpec, vocabulary: int, out: Path, *, folder: Path | str | None = None) -> dict[str, Any]:
    """A small BPE, trained on the training documents of a corpus and saved as a tokenizer.json."""
    if kind_of(spec) != "lm":
        raise ConfigError(f"{spec.name}: is no corpus; a tokenizer is trained on one of {', '.join(corpora.CORPORA)}")
    found = found_locally(spec, folder) or sources.find(corpora.CORPORA[spec.name], folder)
    tokens = train_bpe(carving.training_texts(found, spec.seed), vocabulary, spec.name)
    with disk.saving(out.parent, "-o"):
        disk.write_file(out, tokens.to_json().encode())
    return {"file": str(out), "vocabulary": tokens.vocab_size, "hash": tokens.hash, "from": found.describe()["from"]}


def _largest(spec: DataSpec) -> Store | None:
    """The store of this name, tokenizer and seed that has the most training tokens, if they are enough."""
    fitting = _fitting(spec)
    if not fitting:
        return None
    tokens, path, whole = max(fitting)
    return open_store(path) if whole or spec.tokens is None or tokens >= spec.tokens else None


def _instead(spec: DataSpec, error: DataError) -> Store:
    """What there is without text or tokenizer; when that is too little the error says how much it is."""
    fitting = _fitting(spec) if spec.name in corpora.CORPORA and spec.tokenizer in ("gpt2", "bert", "bytes") else []
    if not fitting:
        raise error
    store = _largest(spec)
    if store is not None:
        return store
    tokens, path, _ = max(fitting)
    raise DataError(
        f"{path}: holds {tokens:,} training tokens, {spec.tokens:,} are asked for; lower tokens or bring the text ({error})"
    ) from None


def _fitting(spec: DataSpec) -> list[tuple[int, Path, bool]]:
    return [
        (index.splits["train"].tokens, path, index.whole)
        for path, index in stores()
        if index.name == spec.name and index.seed == spec.seed and _same_tokenizer(spec, index)
    ]


def _same_tokenizer(spec: DataSpec, index: Index) -> bool:
    """By hash where the tokenizer is a file; the well-known ones by name, for a machine that has the store only."""
    if spec.tokenizer in ("gpt2", "bert"):
        return index.tokenizer.name == spec.tokenizer
    return index.tokenizer.hash == load_tokens(spec.tokenizer).hash


def available(folder: Path | str | None = None) -> list[dict[str, Any]]:
    """Every data set: where it would be read from now (nothing is fetched), and with which tokenizers it is prepared."""
    from oelm.data.tasks import TASKS

    kept = stores()
    rows = []
    for name, dataset in {**corpora.CORPORA, **TASKS}.items():
        place, said = _seen(dataset, folder)
        made = [f"{index.tokenizer.name} {index.splits['train'].tokens:,}" for _, index in kept if index.name == name]
        rows.append(
            {
                "name": name,
                "kind": dataset.kind,
                "title": dataset.title,
                "licence": dataset.licence,
                "place": place,
                "status": said.get("status"),
                "rows": said.get("rows"),
                "official": dict(dataset.official),
                "prepared": [*made, *(["examples"] if _kept_tasks(name) else [])],
                "hub": dataset.hub.id if dataset.hub else None,
                "expected": dataset.expected(),
                "note": said.get("note") or dataset.note,
            }
        )
    made_here = {
        "name": "recall",
        "kind": "recall",
        "title": "Associative recall, made from a seed",
        "status": "synthetic",
    }
    empty: dict[str, Any] = {"rows": None, "official": {}, "prepared": [], "hub": None, "expected": None, "note": ""}
    return [*rows, empty | made_here | {"licence": "none needed", "place": "made"}]


def _seen(dataset: DataSet, folder: Path | str | None) -> tuple[str | None, dict[str, Any]]:
    if dataset.name == "demo":
        found: Found | None = corpora.DemoFound()
    else:
        found = _found_or_none(dataset, folder)
    if found is not None:
        said = found.describe()
        if said["status"] == "real" and (None in said["rows"].values()):
            said["status"] = "unchecked"  # counted when it is prepared
        return found.place, said
    if dataset.hub is None:
        return None, {}
    return ("cache" if hub.in_cache(dataset.hub.id) else "hub"), {}


def _found_or_none(dataset: DataSet, folder: Path | str | None) -> Found | None:
    """Not here is no fault of a list; a folder that does not exist is."""
    sources.data_folders(folder)
    try:
        return sources.find_local(dataset, folder)
    except DataError:
        return sources.find_local(dataset) if folder is not None else None


def _kept_tasks(name: str) -> bool:
    return any(any(base.glob(f"{name}-*.task.npz")) for base in stores_folders())


def describe(source: Any) -> dict[str, Any]:
    """What is in a source, as plain data."""
    if isinstance(source, LmSource):
        from oelm.data import contents

        return contents.describe(source)
    from oelm.data import tasks

    return tasks.describe(source)


def pack(source: Any, spec: DataSpec, out: Path) -> Path:
    """A source as one compressed file; of a task the name is fixed, and `out` is the folder."""
    if isinstance(source, LmSource):
        file = out / f"{source.name}.oelm.xz" if out.is_dir() else out
        parcel.pack(source.store, file, tokens=spec.tokens)
        return file
    from oelm.data import tasks
    from oelm.data.prepared import Prepared

    if not isinstance(source, Prepared):
        raise ConfigError(f"{source.name}: is made from its seed everywhere; there is nothing to pack")
    with disk.saving(out, "-o"):
        return tasks.pack(source, out, spec)


def unpack(file: Path) -> dict[str, Any]:
    """Bring in what `pack` wrote."""
    if not file.name.endswith(".task.npz"):
        store = parcel.unpack(file)
        return {"name": store.index.name, "folder": str(store.folder), "fingerprint": store.fingerprint()}
    from oelm.data import prepared as task_files

    task = task_files.load(file)
    base = stores_folders()[0]
    with disk.saving(base):
        disk.write_file(base / file.name, file.read_bytes())
    return {"name": task.name, "folder": str(base), "fingerprint": task.fingerprint}


__all__ = [
    "Damaged",
    "DataSet",
    "Source",
    "available",
    "describe",
    "kind_of",
    "load",
    "load_lm",
    "names",
    "pack",
    "store_of",
    "train_tokenizer",
    "unpack",
]
