"""Settings of a run as plain tables: overriding some of them, by dotted keys or nested tables. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from oelm.errors import ConfigError
from oelm.train.run import Run
from oelm.values import parse_toml


ORIGINS = frozenset({"preset", "path", "base"})  # a table with one of these says what it is, not what it changes


def with_overrides(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with some changed, by dotted keys or nested tables.

    A table merges into what is there; one that names its origin (preset, path, base) replaces it. One of steps, epochs
    and tokens replaces the others.
    """
    result = _copied(base)
    for dotted, value in overrides.items():
        if isinstance(value, Mapping) and dotted in Run.model_fields and not ORIGINS & set(value):
            result = with_overrides(result, {f"{dotted}.{key}": one for key, one in value.items()})
            continue
        *path, last = dotted.split(".")
        table = result
        for part in path:
            table[part] = _as_table(part, table.get(part))
            table = table[part]
        if path == ["budget"] and last in ("steps", "epochs", "tokens"):
            for other in ("steps", "epochs", "tokens"):
                table.pop(other, None)
        table[last] = _copied(value) if isinstance(value, Mapping) else value
    return result


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _as_table(key: str, value: Any) -> dict[str, Any]:
    """The table a short form stands for, so that a dotted key can change one entry of it."""
    if isinstance(value, Mapping):
        return dict(value)
    short = {"model": "preset", "data": "name", "variant": "base"}
    return {short[key]: value} if isinstance(value, str) and key in short else {}


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """`--set optimizer.lr=1e-3`: values as TOML, bare words as strings."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {pair!r}: write key=value, as in --set optimizer.lr=1e-3")
        if key in result:
            raise ConfigError(f"--set {key}: is given twice; keep one")
        try:
            result[key] = parse_toml(f"value = {text}", where="--set")["value"]
        except ConfigError:
            if not re.fullmatch(r"[\w./:@+-]+", text.strip()):
                raise ConfigError(f"--set {pair!r}: the value cannot be read; quote it as in TOML") from None
            result[key] = text.strip()
    return result
