"""A store as one compressed file, for a machine that has neither the text nor the hub.

A parcel is an .xz file: the index as one line of JSON, then the tokenizer and every shard in the order of the index, each
of the length that the index says. LZMA on 2-byte positions makes GPT-2 ids 16 % smaller than deflate does.
Refuses a parcel that is cut off, altered or not one; unpacking is atomic and never overwrites a good store.
"""

from __future__ import annotations

import lzma
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from oelm.data.disk import held, saving, sync_folder, write_file
from oelm.data.store import (
    INDEX,
    TOKENIZER,
    Index,
    Shard,
    Store,
    cut_shards,
    hash_of,
    open_store,
    shard_files,
    stores_folders,
)
from oelm.errors import DataError, MachineError


_FILTERS: list[dict[str, Any]] = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]
_LONGEST_INDEX = 16 << 20
_BLOCK = 1 << 20


def pack(store: Store, file: Path, *, tokens: int | None = None) -> Index:
    """Write the store, or the first `tokens` training tokens of it with the other splits whole; returns its index."""
    index, contents = _cut(store, tokens)
    beside = file.with_name(file.name + ".new")
    with saving(file.parent, "-o"):
        try:
            with lzma.open(beside, "wb", format=lzma.FORMAT_XZ, filters=_FILTERS) as out:
                out.write(index.model_dump_json().encode() + b"\n")
                out.write(store.tokenizer_text.encode())
                for array in contents:
                    out.write(array.tobytes())
            os.replace(beside, file)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
    return index


def unpack(file: Path, base: Path | None = None) -> Store:
    """The store of a parcel, checked and in place."""
    folder = base or stores_folders()[0]
    try:
        with lzma.open(file, "rb") as source:
            index = _index(source, file)
            name = _folder_name(index)
            with saving(folder), held(folder, name, wait=True):
                target = folder / name
                if (target / INDEX).is_file():
                    try:
                        return open_store(target)
                    except DataError:
                        shutil.rmtree(target)
                _unpack_into(source, index, target, file)
                return open_store(target)
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; check the name") from None
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{file}: is not a whole parcel of oelm data pack ({error}); copy it again") from None
    except OSError as error:
        raise MachineError(f"{file}: cannot be read ({error.strerror or error}); check its permissions") from None


def _cut(store: Store, tokens: int | None) -> tuple[Index, Iterator[npt.NDArray[Any]]]:
    index = store.index
    train = index.splits["train"]
    arrays = {split: list(zip(store.parts[split], store.starts[split], strict=True)) for split in index.splits}
    if tokens is not None and tokens < train.tokens:
        if tokens < 2:
            raise DataError(f"{tokens} tokens are too few for a parcel; give 2 or more")
        kept = cut_shards(store.parts["train"], store.starts["train"], tokens)
        arrays["train"] = kept
        shards = tuple(
            Shard(tokens=len(ids), sha256=hash_of(ids), starts=len(starts), starts_sha256=hash_of(starts))
            for ids, starts in kept
        )
        share = tokens / train.tokens  # the text of a cut split is known in proportion only
        part = train.changed(
            tokens=tokens,
            documents=sum(shard.starts for shard in shards),
            shards=shards,
            **{name: round(getattr(train, name) * share) for name in ("words", "bytes", "characters")},
        )
        index = index.changed(limit=tokens, splits=index.splits | {"train": part})
    return index, (array for split in index.splits for pair in arrays[split] for array in pair)


def _index(source: IO[bytes], file: Path) -> Index:
    line = source.readline(_LONGEST_INDEX)
    try:
        return Index.model_validate_json(line)
    except ValidationError:
        raise DataError(f"{file}: is not a parcel of oelm data pack; name the right file") from None


def _folder_name(index: Index) -> str:
    from oelm.values import digest

    tokenizer = "".join(c if c.isalnum() else "-" for c in index.tokenizer.name)[:24]
    return f"{index.name}-{tokenizer}-packed-{digest(index.model_dump(exclude={'provenance'}), 12)}"


def _unpack_into(source: IO[bytes], index: Index, target: Path, file: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write_file(partial / TOKENIZER, _read(source, index.tokenizer.bytes, file))
        width = np.dtype(index.dtype).itemsize
        for split, part in index.splits.items():
            for number, shard in enumerate(part.shards):
                names = shard_files(split, number)
                for name, size, expected in (
                    (names[0], shard.tokens * width, shard.sha256),
                    (names[1], shard.starts * 4, shard.starts_sha256),
                ):
                    if write_file(partial / name, _read(source, size, file)) != expected:
                        raise DataError(f"{file}: {name} does not have the hash of its index; copy the file again")
        write_file(partial / INDEX, index.model_dump_json(indent=1).encode())
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read(source: IO[bytes], size: int, file: Path) -> bytes:
    """Exactly `size` bytes, read in blocks: a lie about the size allocates nothing."""
    blocks = []
    while size > 0:
        block = source.read(min(size, _BLOCK))
        if not block:
            raise DataError(f"{file}: ends too early; copy it again")
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)
