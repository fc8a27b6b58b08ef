"""Texts that occur twice: a normal form, duplicates within and between splits, and carving that leaks none of them.

Owns the definition of "near-equal": Unicode NFKC, case, punctuation, markup breaks and spaces do not count. Two texts
that are near-equal always fall on the same side of a carved split. Refuses to carve from too few texts.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from oelm.errors import ConfigError, DataError


_BREAKS = re.compile(r"<br\s*/?>", re.IGNORECASE)
_NOT_WORDS = re.compile(r"[\W_]+", re.UNICODE)


def normal_form(text: str) -> str:
    """Words only: what is left when case, punctuation, line breaks and kinds of letters do not count.

    A text without any word (":-)") stays as it is, so that all of these do not become one.
    """
    plain = unicodedata.normalize("NFKC", _BREAKS.sub(" ", text)).casefold()
    return _NOT_WORDS.sub(" ", plain).strip() or plain.strip()


def text_hash(text: str, *, normalised: bool = True) -> bytes:
    """16 bytes that stand for a text."""
    chosen = normal_form(text) if normalised else text
    return hashlib.blake2b(chosen.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def carve(keys: Sequence[str], shares: Mapping[str, float], seed: int, *, where: str = "the data") -> list[str]:
    """The split of each row: one of `shares` for about that share of the different keys, by their hash, else "train".

    A row's side depends on its own key and the seed: rows that are dropped or reordered move no other row, and rows with
    near-equal keys stay together. Where so few keys are there that a split, train too, would stay empty, it gets the
    lowest hash of another that has several.
    """
    if not all(share > 0 for share in shares.values()) or sum(shares.values()) >= 1:
        raise ConfigError(f"shares of carved splits: {dict(shares)} must be above 0 and below 1 together")
    salt = seed.to_bytes(8, "big")
    hashes = [_number(normal_form(key), salt) for key in keys]
    chosen: dict[int, str] = {}
    for value in sorted(set(hashes)):
        chosen[value] = _side(value / 2**64, shares)
    if len(chosen) <= len(shares):
        raise DataError(
            f"{where}: has {len(chosen)} different text{'s' if len(chosen) != 1 else ''}, too few to take "
            f"{' and '.join(shares)} from; give more, or files for these splits"
        )
    for split in (*shares, "train"):
        sizes = Counter(chosen.values())
        if split not in sizes:
            giver = "train" if sizes["train"] > 1 else max(sizes, key=sizes.__getitem__)
            chosen[min(value for value, side in chosen.items() if side == giver)] = split
    return [chosen[value] for value in hashes]


def _side(position: float, shares: Mapping[str, float]) -> str:
    for split, share in shares.items():
        if position < share:
            return split
        position -= share
    return "train"


def _number(text: str, salt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=salt, digest_size=8).digest())


def duplicates(splits: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """How many texts occur twice, exactly and in normal form.

    {"within": {split: {"exact": n, "normalised": n}}, "between": {"train & test": {"exact": n, "normalised": n}}}:
    within, the rows beyond the first of their kind; between, the rows of the later split that also stand in the earlier.
    """
    exact = {name: [text_hash(text, normalised=False) for text in texts] for name, texts in splits.items()}
    normal = {name: [text_hash(text) for text in texts] for name, texts in splits.items()}
    within = {
        name: {
            "exact": len(exact[name]) - len(set(exact[name])),
            "normalised": len(normal[name]) - len(set(normal[name])),
        }
        for name in splits
    }
    between: dict[str, dict[str, int]] = {}
    names = list(splits)
    for position, later in enumerate(names):
        for earlier in names[:position]:
            between[f"{earlier} & {later}"] = {
                "exact": _in_both(exact[earlier], exact[later]),
                "normalised": _in_both(normal[earlier], normal[later]),
            }
    return {"within": within, "between": between}


def _in_both(earlier: Sequence[bytes], later: Sequence[bytes]) -> int:
    known = set(earlier)
    return sum(key in known for key in later)
