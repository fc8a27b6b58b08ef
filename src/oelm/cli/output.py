"""What the command prints: results to stdout, messages to stderr, one line an error."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn


def clean(text: str) -> str:
    """Control characters escaped, one line: names and paths may hold anything."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, then the exit code."""
    print(f"error: {clean(message) or 'unknown error; run again with --debug'}", file=sys.stderr)
    sys.exit(code)


def note(message: str) -> None:
    """A message for the person at the terminal."""
    print(clean(message), file=sys.stderr)


def as_json(data: Any) -> None:
    """A machine-readable result on stdout."""
    print(json.dumps(data, indent=2, sort_keys=False, allow_nan=False, default=str))
