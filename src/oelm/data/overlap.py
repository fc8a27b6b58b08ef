"""Texts that occur twice: a normal form, duplicates within and between splits, and carving that leaks none of them.

Owns the definition of "near-equal": Unicode NFKC, case, punctuation, markup breaks and spaces do not count. Two texts
that are near-equal always fall on the same side of a carved split. Refuses a carved share outside (0, 1).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.errors import ConfigError


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


def carve(keys: Sequence[str], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """True for the rows that go to the carved split: about `share` of the different keys, by their hash.

    A row's side depends on its own key and the seed only: rows that are added, dropped or reordered move no other row,
    and rows with near-equal keys stay together.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError(f"share of a carved split: {share!r} is not between 0 and 1")
    salt = seed.to_bytes(8, "big")
    limit = int(share * 2**64)
    sides = (
        int.from_bytes(
            hashlib.blake2b(normal_form(key).encode("utf-8", "surrogatepass"), key=salt, digest_size=8).digest()
        )
        < limit
        for key in keys
    )
    return np.fromiter(sides, dtype=np.bool_, count=len(keys))


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
