"""Splits that a corpus does not have, taken from its training documents by hash.

A document's side depends on its own text and the seed, so equal documents stay together. Large corpora use a fixed
share of all hashes; small ones (a sample, a file of the user's) the lowest hashes, so that no split is empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from oelm.data import corpora
from oelm.data.reading import Piece, cut_point
from oelm.data.sources import FilesFound, Found
from oelm.errors import DataError


Route = Callable[[str], str]  # the first piece of a document -> its split
SMALL_SHARE = 0.05
FEW_DOCUMENTS = 20  # fewer are cut into blocks before they are shared out among splits
BLOCK = 2000  # characters of a unit, where one text file has no documents of its own
LONGEST_BLOCK = 16_000
_WHOLE = 2**64


def shares(found: Found) -> dict[str, float]:
    """Which splits have to be taken from train, and how much of it: more of a sample than of a whole set."""
    part = found.place == "local" or found.describe()["status"] == "partial"
    wanted = {split: found.dataset.carve.get(split, SMALL_SHARE) for split in ("validation", "test")}
    return {
        split: max(share, SMALL_SHARE) if part else share
        for split, share in wanted.items()
        if split not in found.splits
    }


def units(found: Found, seed: int, split: str, carved: Mapping[str, float]) -> tuple[Iterator[Piece], Route]:
    """The pieces of a split's files, and which split each document belongs to."""
    if split != "train" or not carved:
        return corpora.documents(found, split), everything(split)
    if not isinstance(found, FilesFound) or _is_whole(found):
        return corpora.documents(found, split), by_share(carved, seed)
    cut_up = sum(piece.starts for piece in corpora.documents(found, split)) < FEW_DOCUMENTS

    def read() -> Iterator[Piece]:
        whole = corpora.documents(found, split)
        return blocks(whole) if cut_up else whole

    return read(), by_rank(carved, seed, read(), str(found.files["train"][0]))


def training_texts(found: Found, seed: int) -> Iterator[str]:
    """The training documents alone, in pieces: what a tokenizer may be trained on."""
    pieces, route = units(found, seed, "train", shares(found))
    split = "train"
    for piece in pieces:
        split = route(piece.text) if piece.starts else split
        if split == "train":
            yield piece.text


def _is_whole(found: FilesFound) -> bool:
    """Known to be all of a large set, so that a fixed share of it is not empty."""
    return found.place != "local" and found.describe()["status"] == "real" and found.counts()["train"] is not None


def everything(split: str) -> Route:
    """All documents to one split."""
    return lambda _: split


def by_share(shares: Mapping[str, float], seed: int) -> Route:
    """A fixed share of all hashes to each split."""
    return _by_limits({split: int(share * _WHOLE) for split, share in shares.items()}, seed)


def by_rank(shares: Mapping[str, float], seed: int, documents: Iterable[Piece], where: str) -> Route:
    """The lowest hashes of these documents to each split, at least one document each."""
    hashes = sorted({document_hash(piece.text, seed) for piece in documents if piece.starts})
    if len(hashes) < len(shares) + 1:
        raise DataError(
            f"{where}: holds {len(hashes)} different document{'s' if len(hashes) != 1 else ''}, too few to take "
            f"{' and '.join(shares)} from; give more text, or a folder with train, validation and test files"
        )
    widths, used, floor = {}, 0, 0
    for split, share in shares.items():
        used += max(1, min(round(share * len(hashes)), len(hashes) // (len(shares) + 1)))
        widths[split] = hashes[used - 1] + 1 - floor
        floor = hashes[used - 1] + 1
    return _by_limits(widths, seed)


def document_hash(text: str, seed: int) -> int:
    """64 bits of a document."""
    key = seed.to_bytes(8, "big")
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest())


def blocks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Running text as units that can be shared out: whole lines of about BLOCK characters, a long line in parts."""
    held = ""
    for piece in pieces:
        if piece.starts and held:
            yield Piece(held, True)
            held = ""
        held += piece.text
        begin = 0
        while len(held) - begin > LONGEST_BLOCK:
            end = _block_end(held, begin)
            yield Piece(held[begin:end], True)
            begin = end
        held = held[begin:]
    while len(held) > BLOCK and (end := _block_end(held, 0)) < len(held):
        yield Piece(held[:end], True)
        held = held[end:]
    if held.strip():
        yield Piece(held, True)


def _block_end(text: str, begin: int) -> int:
    """After the first line end beyond BLOCK; in a line that is too long, before white space."""
    window = text[begin : begin + LONGEST_BLOCK]
    at = window.find("\n", BLOCK)
    if at >= 0:
        return begin + at + 1
    return begin + (cut_point(window, LONGEST_BLOCK - 1) if len(window) == LONGEST_BLOCK else len(window))


def _by_limits(widths: Mapping[str, int], seed: int) -> Route:
    def route(text: str) -> str:
        value = document_hash(text, seed)
        for split, width in widths.items():
            if value < width:
                return split
            value -= width
        return "train"

    return route
