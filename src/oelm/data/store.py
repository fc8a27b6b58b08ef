"""Token stores: memory-mapped shards beside an index with every hash; opened whole and right, or refused.

A store is a folder: index.json, tokenizer.json, and for each split `<split>-00000.tokens` (ids, uint16 or uint32, little
endian) with `<split>-00000.starts` (where documents begin in that shard, uint32). A store of the first N training tokens
is the beginning of the whole store, bit for bit, and has the same fingerprint as that beginning.
Refuses a truncated, altered or foreign store and names the shard. Writing is prepare.py's.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from oelm.errors import DataError, MachineError
from oelm.values import Value, digest, explain


FORMAT = "oelm-token-store"
SHARD_TOKENS = 1 << 24
INDEX = "index.json"
TOKENIZER = "tokenizer.json"

Count = Annotated[int, Field(ge=0)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Ids = npt.NDArray[np.int64]


class Damaged(DataError):
    """A store that is not what was written."""


class Shard(Value):
    """Two files: ids, and where documents begin."""

    tokens: Count
    sha256: Hash
    starts: Count
    starts_sha256: Hash


class SplitIndex(Value):
    """What a split holds; words, bytes and characters are of its text, for perplexity per word and bits per byte."""

    tokens: Count
    documents: Count
    words: Count
    bytes: Count
    characters: Count
    shards: tuple[Shard, ...]


class TokenizerIndex(Value):
    """Which tokenizer made the ids."""

    name: str
    hash: Hash
    file_sha256: Hash
    bytes: Count  # of the file
    vocab_size: Annotated[int, Field(ge=2, le=2**32)]
    eos_id: Count
    pad_id: Count

    @model_validator(mode="after")
    def _inside(self) -> TokenizerIndex:
        if max(self.eos_id, self.pad_id) >= self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} and pad_id {self.pad_id}: the vocabulary has {self.vocab_size}")
        return self


class Index(Value):
    """index.json."""

    format: Literal["oelm-token-store"] = "oelm-token-store"
    version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    tokenizer: TokenizerIndex
    dtype: Literal["uint16", "uint32"]
    shard_tokens: Annotated[int, Field(ge=1)]
    limit: Annotated[int, Field(ge=1)] | None  # only the first so many training tokens
    separated: bool  # whether an end-of-text token comes before every document, or before the first only
    source: str  # identity of the files it was made from
    seed: Count  # of carved splits
    splits: dict[Literal["train", "validation", "test"], SplitIndex]
    provenance: dict[str, Any]

    @property
    def whole(self) -> bool:
        """Whether no limit cut the training split."""
        return self.limit is None or self.splits["train"].tokens < self.limit


def shard_files(split: str, number: int) -> tuple[str, str]:
    """The names of a shard's two files."""
    return f"{split}-{number:05d}.tokens", f"{split}-{number:05d}.starts"


def vocabulary_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Stream:
    """The ids of one split, as one long row over its shards; `limit` reads only the first so many."""

    def __init__(self, parts: list[npt.NDArray[Any]], starts: list[npt.NDArray[np.uint32]], limit: int | None) -> None:
        self._parts = [np.asarray(part) for part in parts]  # plain views: slicing a memmap costs ten times as much
        self._ends = list(itertools.accumulate(len(part) for part in parts))
        whole = self._ends[-1] if parts else 0
        self._length = whole if limit is None else min(whole, limit)
        offsets = [0, *self._ends[:-1]] if parts else []
        joined = [part.astype(np.int64) + offset for part, offset in zip(starts, offsets, strict=True)]
        every = np.concatenate(joined) if joined else np.zeros(0, np.int64)
        self.starts: Ids = every[every < self._length]

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Ids:
        """Ids from `start` up to `stop`, as int64."""
        if not 0 <= start <= stop <= self._length:
            raise DataError(f"tokens {start:,} to {stop:,} are outside of the split's {self._length:,}")
        out = np.empty(stop - start, dtype=np.int64)
        shard = bisect.bisect_right(self._ends, start)
        done = 0
        while done < len(out):
            part = self._parts[shard]
            begin = start + done - (self._ends[shard] - len(part))
            taken = part[begin : begin + len(out) - done]
            out[done : done + len(taken)] = taken
            done += len(taken)
            shard += 1
        return out

    def document_ids(self, begins: Ids, lengths: Ids, width: int) -> Ids:
        """For each place of each window the number of its document, counted from 0 within the window; -1 beyond its end.

        All windows in one go: a batch costs as many calls as one window would.
        """
        first = np.searchsorted(self.starts, begins + 1)
        counts = np.searchsorted(self.starts, begins + lengths) - first
        rows = np.repeat(np.arange(len(begins)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = np.zeros((len(begins), width), dtype=np.int64)
        numbers[rows, self.starts[first[rows] + within] - begins[rows]] = 1
        np.cumsum(numbers, axis=1, out=numbers)
        if lengths.min(initial=width) < width:
            numbers[np.arange(width) >= lengths[:, None]] = -1
        return numbers


@dataclass(frozen=True)
class Store:
    """An opened store, every byte of which has been checked."""

    folder: Path
    index: Index
    parts: dict[str, list[npt.NDArray[Any]]]
    starts: dict[str, list[npt.NDArray[np.uint32]]]

    def stream(self, split: str, limit: int | None = None) -> Stream:
        """The ids of a split; the limit is of the training split only."""
        if split not in self.index.splits:
            raise DataError(f"{self.folder}: has no split {split!r}; it has {', '.join(self.index.splits)}")
        return Stream(self.parts[split], self.starts[split], limit if split == "train" else None)

    def fingerprint(self, limit: int | None = None) -> str:
        """A hash of the ids, the boundaries and the tokenizer, and of nothing else."""
        train = self.index.splits["train"]
        if limit is not None and limit < train.tokens:
            shards = self._cut_hashes(limit)
        else:
            shards = [(shard.sha256, shard.starts_sha256) for shard in train.shards]
        rest = {
            split: [(shard.sha256, shard.starts_sha256) for shard in part.shards]
            for split, part in self.index.splits.items()
            if split != "train"
        }
        return digest(
            {
                "tokenizer": self.index.tokenizer.hash,
                "dtype": self.index.dtype,
                "shard_tokens": self.index.shard_tokens,
                "splits": {"train": shards, **rest},
            },
            64,
        )

    def _cut_hashes(self, limit: int) -> list[tuple[str, str]]:
        return [
            (hash_of(tokens), hash_of(starts))
            for tokens, starts in cut_shards(self.parts["train"], self.starts["train"], limit)
        ]

    @cached_property
    def tokenizer_text(self) -> str:
        """The tokenizer's file."""
        return (self.folder / TOKENIZER).read_text(encoding="utf-8")


def hash_of(data: npt.NDArray[Any]) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(data.data if data.size else b"").hexdigest()


def cut_shards(
    parts: list[npt.NDArray[Any]], starts: list[npt.NDArray[np.uint32]], limit: int
) -> list[tuple[npt.NDArray[Any], npt.NDArray[np.uint32]]]:
    """The shards of the first `limit` tokens."""
    kept = []
    for part, begins in zip(parts, starts, strict=True):
        if limit <= 0:
            break
        tokens = part[:limit]
        kept.append((np.ascontiguousarray(tokens), np.ascontiguousarray(begins[begins < len(tokens)])))
        limit -= len(tokens)
    return kept


def stores_folders() -> list[Path]:
    """Where stores are looked for; new ones go to the first."""
    if home := os.environ.get("OELM_HOME"):
        return [Path(home).expanduser() / "stores"]
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    beside = Path.cwd() / "stores"
    usual = Path(cache).expanduser() / "oelm" / "stores"
    return [beside, usual] if beside.is_dir() else [usual]


def read_index(folder: Path) -> Index:
    """index.json, or one DataError that says what is wrong with it."""
    path = folder / INDEX
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{folder}: is not a token store (no {INDEX}); prepare it again") from None
    except OSError as error:
        raise MachineError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    try:
        return Index.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{explain(error, Index, str(path))}; the store is damaged or foreign: remove {folder}"
        ) from None


def stores() -> list[tuple[Path, Index]]:
    """Every store with a readable index, without checking its shards."""
    found = []
    for base in stores_folders():
        for path in sorted(base.glob(f"*/{INDEX}")):
            if path.parent.suffix == ".partial":
                continue
            try:
                found.append((path.parent, read_index(path.parent)))
            except (DataError, MachineError):
                continue
    return found


def open_store(folder: Path) -> Store:
    """The store, after every shard has been compared with its hash; `Damaged` when one is not what was written."""
    try:
        return _opened(folder)
    except DataError as error:
        raise Damaged(str(error)) from None


def _opened(folder: Path) -> Store:
    index = read_index(folder)
    _check_file(folder / TOKENIZER, index.tokenizer.file_sha256)
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    starts: dict[str, list[npt.NDArray[np.uint32]]] = {}
    checks: list[Callable[[], None]] = []
    for split, held in index.splits.items():
        parts[split], starts[split] = [], []
        for number, shard in enumerate(held.shards):
            ids_file, starts_file = (folder / name for name in shard_files(split, number))
            ids = _mapped(ids_file, index.dtype, shard.tokens)
            begins = _mapped(starts_file, "uint32", shard.starts)
            parts[split].append(ids)
            starts[split].append(begins)
            checks.append(functools.partial(_check_ids, ids_file, ids, shard, index.tokenizer.vocab_size))
            checks.append(functools.partial(_check_starts, starts_file, begins, shard))
        if sum(shard.tokens for shard in held.shards) != held.tokens:
            raise DataError(
                f"{folder / INDEX}: the shards of {split} do not add up to its tokens; the index is altered"
            )
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # hashing lets go of the GIL
        list(pool.map(lambda check: check(), checks))
    return Store(folder, index, parts, starts)


def _mapped(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    wanted = np.dtype(dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
        if size != count * wanted.itemsize:
            raise DataError(
                f"{path}: has {size:,} bytes, the index says {count * wanted.itemsize:,}; "
                f"the shard is truncated or foreign: prepare the store again"
            )
        if not count:
            return np.zeros(0, dtype=wanted)
        return np.memmap(path, dtype=wanted, mode="r", shape=(count,))
    except FileNotFoundError:
        raise DataError(f"{path}: is missing; prepare the store again") from None
    except OSError as error:
        raise MachineError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _check_ids(path: Path, ids: npt.NDArray[Any], shard: Shard, vocabulary: int) -> None:
    _check_hash(path, ids, shard.sha256)
    if ids.size and int(ids.max()) >= vocabulary:
        raise DataError(f"{path}: holds the id {int(ids.max())}, the vocabulary has {vocabulary}; the store is foreign")


def _check_starts(path: Path, starts: npt.NDArray[Any], shard: Shard) -> None:
    _check_hash(path, starts, shard.starts_sha256)
    if starts.size and (int(starts[-1]) >= shard.tokens or np.any(starts[1:] <= starts[:-1])):
        raise DataError(f"{path}: the beginnings of documents are not in order; the store is foreign")


def _check_hash(path: Path, data: npt.NDArray[Any], expected: str) -> None:
    if hash_of(data) != expected:
        raise DataError(f"{path}: does not have the hash of the index; the shard is altered: prepare the store again")


def _check_file(path: Path, expected: str) -> None:
    try:
        with open(path, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise DataError(f"{path}: is missing; prepare the store again") from None
    if actual != expected:
        raise DataError(f"{path}: does not have the hash of the index; it is altered: prepare the store again")
