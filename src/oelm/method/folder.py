"""A checkpoint's folder on disk: hashes, and writes that appear whole or not at all.

Owns the order of write, sync and rename. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


RECORD = "oelm.json"


def checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document's canonical form, its own checksum left out."""
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256(file: Path) -> str:
    """Of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the folder's oelm.json, whole or not at all."""
    temporary = folder / f".{RECORD}.{secrets.token_hex(4)}.tmp"
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sync(temporary)
    os.replace(temporary, folder / RECORD)
    sync(folder)


def sync(path: Path) -> None:
    """To disk: a rename may otherwise arrive there before what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_in_place(temporary: Path, path: Path) -> None:
    """Give the finished folder its name; one that had it is removed only after."""
    old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    if path.exists():
        os.rename(path, old)
    os.rename(temporary, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)
