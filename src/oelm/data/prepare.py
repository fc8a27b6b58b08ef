"""Text -> token store, once: atomic, resumable after a kill, one process at a time.

Work goes into `<store>.partial`; whole shards there are kept by a killed preparation and used by the next. The index is
written last and the folder renamed into place, so a store that can be seen is whole. Refuses to write what store.py
would refuse to read, and leaves nothing behind when the text is at fault.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from oelm.data import carving, corpora
from oelm.data.disk import held, saving, sync_folder, write_file
from oelm.data.reading import Piece
from oelm.data.sources import SPLITS, Found, judged
from oelm.data.store import (
    INDEX,
    SHARD_TOKENS,
    TOKENIZER,
    Damaged,
    Index,
    Shard,
    SplitIndex,
    Store,
    TokenizerIndex,
    open_store,
    shard_files,
    stores_folders,
    vocabulary_dtype,
)
from oelm.data.tokens import Tokens
from oelm.errors import DataError
from oelm.values import digest


BATCH_CHARACTERS = 8 << 20  # handed to the tokenizer at once
STATE = "progress.json"

Report = Callable[[str, int, int], None]  # split, tokens so far, bytes of text so far


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a store is made from; two of the same key are the same store."""

    found: Found
    tokens: Tokens
    limit: int | None = None
    seed: int = 0
    shard_tokens: int = SHARD_TOKENS

    @property
    def name(self) -> str:
        return self.found.dataset.name

    @property
    def key(self) -> str:
        """The name of the store's folder."""
        parts = (self.found.identity(), self.tokens.hash, self.limit, self.seed, self.shard_tokens)
        tokenizer = "".join(c if c.isalnum() or c in "-" else "-" for c in Path(self.tokens.name).stem)[:24]
        return f"{self.name}-{tokenizer}-{digest(parts, 12)}"


def prepared(
    wanted: Wanted, *, wait: bool = True, report: Report | None = None, base: Path | None = None, repair: bool = False
) -> Store:
    """The store, made now if it is not there; a damaged one is refused, or made again with `repair`."""
    for folder in [base] if base else stores_folders():
        path = folder / wanted.key
        if (path / INDEX).is_file():
            with contextlib.suppress(*((Damaged,) if repair else ())):
                return open_store(path)
    folder = base or stores_folders()[0]
    with saving(folder), held(folder, wanted.key, wait=wait):
        path = folder / wanted.key
        if (path / INDEX).is_file():  # another process made it while this one waited
            try:
                return open_store(path)
            except Damaged:
                if not repair:
                    raise
                shutil.rmtree(path)
        _write(wanted, path, report)
        return open_store(path)


@dataclass
class _Writer:
    """One split being written. Its state after a shard is enough to go on from there in another process."""

    split: str
    folder: Path
    dtype: npt.DTypeLike
    shard_tokens: int
    limit: int | None
    eos: int
    separated: bool
    shards: list[dict[str, Any]] = field(default_factory=list)
    document: int = -1  # the document that the last whole shard ended in
    offset: int = 0  # how many of its tokens that shard took
    documents: int = 0
    words: int = 0
    bytes: int = 0
    characters: int = 0
    _current: int = -1
    _emitted: int = 0
    _before: dict[str, int] = field(default_factory=dict)  # counts before the current document
    _saved: dict[str, int] = field(default_factory=dict)  # counts before `document`
    _held: list[npt.NDArray[Any]] = field(default_factory=list)
    _held_tokens: int = 0
    _starts: list[int] = field(default_factory=list)
    _skip: int = 0

    @property
    def tokens(self) -> int:
        return sum(int(shard["tokens"]) for shard in self.shards) + self._held_tokens

    @property
    def full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def wants(self, document: int) -> bool:
        """Whether a document has still to be encoded."""
        return document >= self.document and not self.full

    def add(self, document: int, piece: Piece, ids: npt.NDArray[Any], words: int) -> None:
        """One piece of a document, in order."""
        if self.full:
            return
        if piece.starts:
            self._begin(document)
        self.words += words
        self.bytes += len(piece.text.encode("utf-8", "surrogatepass"))
        self.characters += len(piece.text)
        row = ids.astype(self.dtype)
        if piece.starts and (self.separated or self.documents == 1):
            row = np.concatenate((np.asarray([self.eos], dtype=self.dtype), row))
        self._emitted += len(row)
        dropped = min(self._skip, len(row))
        self._skip -= dropped
        row = row[dropped:]
        if self.limit is not None:
            row = row[: self.limit - self.tokens]
        self._held.append(row)
        self._held_tokens += len(row)
        while self._held_tokens >= self.shard_tokens:
            self._flush(self.shard_tokens)

    def _begin(self, document: int) -> None:
        self._before = {name: getattr(self, name) for name in ("documents", "words", "bytes", "characters")}
        self.documents += 1
        self._current, self._emitted = document, 0
        self._skip = self.offset if document == self.document else 0
        if not self._skip:
            self._starts.append(self._held_tokens)

    def finish(self) -> None:
        """The last, shorter shard."""
        if self._held_tokens:
            self._flush(self._held_tokens)

    def _flush(self, count: int) -> None:
        row = np.concatenate(self._held) if len(self._held) > 1 else self._held[0]
        starts = np.asarray([s for s in self._starts if s < count], dtype="<u4")
        names = shard_files(self.split, len(self.shards))
        shard = {
            "tokens": count,
            "sha256": write_file(self.folder / names[0], row[:count].astype(np.dtype(self.dtype).newbyteorder("<"))),
            "starts": len(starts),
            "starts_sha256": write_file(self.folder / names[1], starts),
        }
        self.shards.append(shard)
        rest = row[count:].copy()
        self._held, self._held_tokens = [rest], len(rest)
        self._starts = [s - count for s in self._starts if s >= count]
        self.document, self.offset = self._current, self._emitted - len(rest)
        self._saved = self._before

    def state(self) -> dict[str, Any]:
        """To go on from the last whole shard: what came before the document it ended in."""
        return {"shards": self.shards, "document": self.document, "offset": self.offset, "before": self._saved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.shards = list(state["shards"])
        self.document, self.offset = state["document"], state["offset"]
        self._saved = dict(state["before"])
        for name, value in self._saved.items():
            setattr(self, name, value)

    def index(self) -> SplitIndex:
        """The split's part of the index."""
        return SplitIndex(
            tokens=self.tokens,
            documents=self.documents,
            words=self.words,
            bytes=self.bytes,
            characters=self.characters,
            shards=tuple(Shard(**shard) for shard in self.shards),
        )


def _write(wanted: Wanted, path: Path, report: Report | None) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.mkdir(exist_ok=True)
    try:
        _write_into(partial, wanted, report)
    except Exception as error:
        # after a DataError the text has to change, and then this is another store; else whole shards are for the next try
        if isinstance(error, DataError) or not (partial / STATE).is_file():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    os.rename(partial, path)
    sync_folder(path.parent)


def _write_into(folder: Path, wanted: Wanted, report: Report | None) -> None:
    splits, provenance = _write_splits(wanted, folder, report)
    tokenizer = wanted.tokens
    file = tokenizer.to_json().encode()
    index = Index(
        name=wanted.name,
        tokenizer=TokenizerIndex(
            name=Path(tokenizer.name).name,
            hash=tokenizer.hash,
            file_sha256=write_file(folder / TOKENIZER, file),
            bytes=len(file),
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        ),
        dtype=vocabulary_dtype(tokenizer.vocab_size),
        shard_tokens=wanted.shard_tokens,
        limit=wanted.limit,
        separated=corpora.separated(wanted.name),
        source=wanted.found.identity(),
        seed=wanted.seed,
        splits=splits,
        provenance=provenance,
    )
    write_file(folder / INDEX, index.model_dump_json(indent=1).encode())
    (folder / STATE).unlink(missing_ok=True)
    sync_folder(folder)


def _write_splits(
    wanted: Wanted, folder: Path, report: Report | None
) -> tuple[dict[Literal["train", "validation", "test"], SplitIndex], dict[str, Any]]:
    carved = carving.shares(wanted.found)
    states = _saved_states(folder)
    writers = {
        split: _Writer(
            split=split,
            folder=folder,
            dtype=vocabulary_dtype(wanted.tokens.vocab_size),
            shard_tokens=wanted.shard_tokens,
            limit=wanted.limit if split == "train" else None,
            eos=wanted.tokens.eos_id,
            separated=corpora.separated(wanted.name),
        )
        for split in SPLITS
        if split in wanted.found.splits or split in carved
    }
    for split, state in states.items():
        writers[split].restore(state)

    def save() -> None:
        write_file(folder / STATE, json.dumps({split: w.state() for split, w in writers.items()}).encode())

    rows: dict[str, int] = {}
    for split in wanted.found.splits:
        units, route = carving.units(wanted.found, wanted.seed, split, carved)
        rows[split] = _encode(units, route, writers, wanted, save, report)
    for writer in writers.values():
        writer.finish()
        if not writer.tokens:
            raise DataError(f"{wanted.name}: the {writer.split} split holds no text; give it some")
    return {split: writers[split].index() for split in writers}, _provenance(wanted, writers, rows, carved)  # type: ignore[misc]


def _saved_states(folder: Path) -> dict[str, Any]:
    """What a killed preparation left, if it is of one piece; else nothing, and its files are removed."""
    path = folder / STATE
    try:
        states = json.loads(path.read_bytes())
        for split, state in states.items():
            for number, shard in enumerate(state["shards"]):
                for name, key in zip(shard_files(split, number), ("sha256", "starts_sha256"), strict=True):
                    if hashlib.sha256((folder / name).read_bytes()).hexdigest() != shard[key]:
                        raise ValueError(name)
        return dict(states)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        for leftover in folder.iterdir():
            leftover.unlink()
        return {}


def _encode(
    units: Iterator[Piece],
    route: carving.Route,
    writers: Mapping[str, _Writer],
    wanted: Wanted,
    save: Callable[[], None],
    report: Report | None,
) -> int:
    """Every unit to its writer, encoded many at a time; returns how many documents there were."""
    waiting: list[tuple[_Writer, int, Piece]] = []
    characters, document, writer = 0, -1, next(iter(writers.values()))
    in_lines = corpora.words_of(wanted.name) == "wikitext"

    def encode() -> None:
        shards = sum(len(w.shards) for w in writers.values())
        rows = wanted.tokens.arrays([piece.text for _, _, piece in waiting])
        for (target, number, piece), ids in zip(waiting, rows, strict=True):
            words = len(piece.text.split()) + (piece.text.count("\n") if in_lines else 0)
            target.add(number, piece, ids, words)
        waiting.clear()
        if sum(len(w.shards) for w in writers.values()) > shards:
            save()
        if report is not None:
            report(writer.split, writer.tokens, writer.bytes)

    for piece in units:
        if piece.starts:
            document += 1
            writer = writers[route(piece.text)]
            if not piece.text.strip():
                continue  # an empty row is no document
        if writer.wants(document):
            waiting.append((writer, document, piece))
            characters += len(piece.text)
        elif wanted.found.place == "hub" and writer.full:
            break  # the rest would be fetched for nothing
        if characters >= BATCH_CHARACTERS:
            encode()
            characters = 0
    if waiting:
        encode()
    return document + 1


def _provenance(
    wanted: Wanted, writers: Mapping[str, _Writer], rows: Mapping[str, int], carved: Mapping[str, float]
) -> dict[str, Any]:
    """What was read, judged by the official counts."""
    said = wanted.found.describe()
    dataset = wanted.found.dataset
    notes = [said["note"]]
    whole = {split: writer for split, writer in writers.items() if not (wanted.limit and split == "train")}
    read = {split: count for split, count in rows.items() if split in whole}
    words = {split: writer.words for split, writer in whole.items()}
    official = corpora.OFFICIAL_WORDS.get(dataset.name, {})
    for known, have, unit in ((dataset.official, read, "rows"), (official, words, "words")):
        known = {split: value for split, value in known.items() if split in have}
        status, note = judged(dataset, have, official=known, unit=unit)
        if status == "partial" and said["status"] == "real":
            said["status"] = status
        if note and note not in said["note"]:
            notes.append(note)
    if carved:
        shares = ", ".join(f"{split} ({share:.2%} of the documents)" for split, share in carved.items())
        notes.append(f"taken from train by hash: {shares}")
    said["note"] = "; ".join(dict.fromkeys(part for part in notes if part))
    return said
