"""Which examples of the test split a run got right: one bit each, in a file beside its record, which holds the file's hash.

Owns the file examples.json and its packing. The statistics resample these bits. Refuses a file that is not the one hashed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.errors import DataError
from oelm.train.folder import strict_json


FILE = "examples.json"
Right = npt.NDArray[np.bool_]


def pack(right: Right) -> str:
    """Bits as text; the first example is the highest bit of the first byte."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def unpack(text: str, count: int) -> Right:
    """The bits of `count` examples. ValueError: the text does not hold that many."""
    packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if count < 1 or len(packed) != -(-count // 8):
        raise ValueError(f"{len(packed)} bytes for {count} examples")
    return np.unpackbits(packed, count=count).astype(bool)


def contents(per_example: Mapping[int, int]) -> str:
    """The file's text, of {index of the example: 1 where it was right}; the bits stand in the order of the index."""
    right = np.array([bool(per_example[index]) for index in sorted(per_example)])
    return strict_json({"split": "test", "metric": "accuracy", "count": len(right), "right": pack(right)}) + "\n"


def named(text: str) -> dict[str, Any]:
    """What result.json says of the file."""
    return {"file": FILE, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read(folder: Path, record: Mapping[str, Any]) -> Right | None:
    """The bits that a record names; None where it names none."""
    said = record.get("examples")
    if not isinstance(said, dict):
        return None
    path = folder / FILE
    try:
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != said.get("sha256"):
            raise DataError(f"{path}: is not what the run wrote (its SHA-256 differs from result.json's); run it again")
        found = json.loads(raw)
        return unpack(found["right"], int(found["count"]))
    except FileNotFoundError:
        raise DataError(f"{path}: is gone, though result.json names it; put it back or run that row again") from None
    except (OSError, ValueError, KeyError, TypeError, binascii.Error) as error:
        raise DataError(f"{path}: cannot be read ({error}); run that row again") from None
