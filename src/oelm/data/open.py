"""The one door to data: `load(spec)` gives batches of any data set, prepared on first use where that is needed.

Owns which kind of source a name means. A source's interface is the same for all kinds (docs/architecture.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from oelm.data import corpora, sources
from oelm.data.prepare import Report, Wanted, prepared
from oelm.data.sources import DataSet, Found
from oelm.data.spec import DataSpec
from oelm.data.store import Index, Store, open_store, stores
from oelm.data.tokens import load_tokens
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

    def eval_batches(self, split: str, batch: int, limit_tokens: int | None = None) -> Iterator[dict[str, Any]]: ...

    def score(self, split: str, outputs: Any) -> dict[str, Any]: ...


# The kinds but language modelling: module and function `load(spec, folder)`.
_OTHERS = {
    "classify": "oelm.data.tasks",
    "tag": "oelm.data.tasks",
    "qa": "oelm.data.tasks",
    "recall": "oelm.data.recall",
}


def load(spec: DataSpec, *, folder: Path | str | None = None) -> Any:
    """The data of a run, ready to be read; `folder` is searched before all other places."""
    kind = kind_of(spec)
    if kind == "lm":
        return load_lm(spec, folder=folder)
    return importlib.import_module(_OTHERS[kind]).load(spec, folder=folder)


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


def load_lm(spec: DataSpec, *, folder: Path | str | None = None, report: Report | None = None) -> LmSource:
    """A corpus as windows: from a store that fits, else prepared from the text."""
    if spec.examples is not None:
        raise ConfigError(f"data.examples: {spec.name} is read in tokens; use tokens")
    return LmSource(spec, store_of(spec, folder=folder, report=report))


def store_of(
    spec: DataSpec, *, folder: Path | str | None = None, report: Report | None = None, wait: bool = True
) -> Store:
    """The store of a corpus.

    The text decides when it is on this machine: another version of it is another store. Where there is only a store,
    the largest that has enough tokens is read.
    """
    found = found_locally(spec, folder)
    if found is None:
        store = _largest(spec)
        if store is not None:
            return store
        found = sources.find(corpora.CORPORA[spec.name], folder)
    tokens = load_tokens(spec.tokenizer, folder)
    whole = Wanted(found=found, tokens=tokens, seed=spec.seed)
    if spec.tokens is not None:
        made = {path.name for path, _ in stores()}
        if whole.key not in made:
            return prepared(
                Wanted(found=found, tokens=tokens, seed=spec.seed, limit=spec.tokens), report=report, wait=wait
            )
    return prepared(whole, report=report, wait=wait)


def found_locally(spec: DataSpec, folder: Path | str | None) -> Found | None:
    """The text of a corpus on this machine, without asking the hub or its cache."""
    if spec.name == "local":
        return sources.local_files(spec.path or "", {"text": "text"} | spec.columns, spec.task)
    if spec.name == "demo":
        return corpora.DemoFound()
    return sources.find_local(corpora.CORPORA[spec.name], folder)


def _largest(spec: DataSpec) -> Store | None:
    """The store of this name, tokenizer and seed that has the most training tokens."""
    fitting = [
        (index.splits["train"].tokens, path)
        for path, index in stores()
        if index.name == spec.name and index.seed == spec.seed and _same_tokenizer(spec, index)
    ]
    if not fitting:
        return None
    tokens, path = max(fitting)
    store = open_store(path)
    if spec.tokens is not None and tokens < spec.tokens and not store.index.whole:
        raise DataError(
            f"{path}: holds {tokens:,} training tokens, {spec.tokens:,} are asked for and the text is not here; "
            f"lower tokens or bring the text"
        )
    return store


def _same_tokenizer(spec: DataSpec, index: Index) -> bool:
    """By hash where the tokenizer is a file; the well-known ones by name, for a machine that has the store only."""
    if spec.tokenizer in ("gpt2", "bert"):
        return index.tokenizer.name == spec.tokenizer
    return index.tokenizer.hash == load_tokens(spec.tokenizer).hash


__all__ = ["DataSet", "Source", "kind_of", "load", "load_lm", "names", "store_of"]
