"""What is in a corpus: sizes, document lengths, samples, and documents that stand in two splits.

For `oelm data inspect`; the same of tasks is in tasks.py.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from oelm.data.store import Stream
from oelm.data.tokens import from_text
from oelm.data.windows import LmSource


_SAMPLE_TOKENS = 60


def describe(source: LmSource, samples: int = 3) -> dict[str, Any]:
    """Plain data that JSON can hold; the names are those of `tasks.describe`."""
    streams: dict[str, Stream] = {
        split: source.store.stream(split, source.spec.tokens) for split in source.store.index.splits
    }
    return {
        "name": source.name,
        "kind": source.kind,
        "fingerprint": source.fingerprint,
        "folder": str(source.store.folder),
        "provenance": source.provenance,
        "splits": {split: _described(source, split, stream) for split, stream in streams.items()},
        "overlap": _overlap(streams),
        "samples": {split: _samples(source, stream, samples) for split, stream in streams.items()},
    }


def _described(source: LmSource, split: str, stream: Stream) -> dict[str, Any]:
    held = source.store.index.splits[split]  # type: ignore[index]
    whole = len(stream) == held.tokens
    lengths = np.diff(np.append(stream.starts, len(stream)))
    return {
        "tokens": len(stream),
        "windows": max(0, (len(stream) - 1) // source.context),
        "documents": len(lengths),
        "words": held.words if whole else None,
        "bytes": held.bytes if whole else None,
        "lengths": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": round(float(lengths.mean()), 2),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
        },
    }


def _samples(source: LmSource, stream: Stream, count: int) -> list[str]:
    store = source.store
    tokens = from_text(store.index.tokenizer.name, store.tokenizer_text, str(store.folder))
    begins = [int(start) for start in stream.starts[:count]]
    return [tokens.decode(stream.read(s, min(s + _SAMPLE_TOKENS, len(stream)))).strip()[:200] for s in begins]


def _overlap(streams: Mapping[str, Stream]) -> dict[str, Any]:
    """Documents whose ids occur twice: within a split, and in a split as well as in an earlier one."""
    hashes = {split: _document_hashes(stream) for split, stream in streams.items()}
    between = {
        f"{earlier} & {later}": {"exact": _in_both(hashes[earlier], hashes[later])}
        for earlier, later in itertools.combinations(hashes, 2)
    }
    return {"within": {s: {"exact": len(have) - len(set(have))} for s, have in hashes.items()}, "between": between}


def _in_both(earlier: list[bytes], later: list[bytes]) -> int:
    known = set(earlier)
    return sum(one in known for one in later)


def _document_hashes(stream: Stream) -> list[bytes]:
    edges = [*stream.starts.tolist(), len(stream)]
    return [
        hashlib.blake2b(stream.read(start, stop).tobytes(), digest_size=16).digest()
        for start, stop in itertools.pairwise(edges)
    ]
