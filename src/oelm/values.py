"""Values: strict, frozen, comparable settings, read from TOML with errors that help.

Every setting of OELM but the Variant (a standard dataclass, so that `oelm.method` needs torch alone) is a
subclass of Value. An error names the file, the key, the value and what is allowed.
No torch here.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from oelm.errors import ConfigError, nearest


MAX_TOML_BYTES = 1_000_000


class Value(BaseModel):
    """Strict (no string for a number), closed (no unknown key), frozen, and free of NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, data: Mapping[str, Any], *, where: str) -> Self:
        """The value from plain data, or one ConfigError that says where it is wrong."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from None

    def changed(self, **values: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self).model_validate(self.model_dump() | values)


def canonical(data: Any) -> str:
    """One text for one value: sorted keys, no spaces, floats as Python's shortest repr."""
    return json.dumps(_plain(data), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(data: Any, length: int = 8) -> str:
    """The first hex digits of the SHA-256 of the canonical text."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:length]


def _plain(data: Any) -> Any:
    """Numbers that are equal get one form (1 and 1.0 are one rate); tuples become lists."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        if not math.isfinite(data):
            raise ConfigError(f"a value is {data!r}: only finite numbers identify a run")
        return int(data) if data.is_integer() and abs(data) < 2**53 else data
    if isinstance(data, Path):
        return str(data)
    return data


def load_toml(path: Path | str) -> dict[str, Any]:
    """The file's table, or one ConfigError with file, line and remedy."""
    path = Path(path)
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder, not a TOML file; name the file")
        size = path.stat().st_size
        if size > MAX_TOML_BYTES:
            raise ConfigError(
                f"{path}: {size:,} bytes is too large for a settings file (limit {MAX_TOML_BYTES:,}); is it the right file?"
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked from {Path.cwd()}); check the name") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror or type(error).__name__}); check its permissions"
        ) from None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{path}: is UTF-16; save it as UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    return parse_toml(text, where=str(path))


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """A table from TOML text; `where` names its origin in errors."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        remedy = "check the TOML there"
        if "overwrite" in message or "twice" in message:
            message = message.replace("Cannot overwrite a value", "this key is given twice").replace(
                "Cannot declare", "cannot declare"
            )
            remedy = "keep one of the two"
        raise ConfigError(f"{where}: {message}; {remedy}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            f"{where}: cannot be read as TOML ({error or type(error).__name__}); check for deep nesting or huge numbers"
        ) from None


def explain(error: ValidationError, cls: type[BaseModel], where: str) -> str:
    """The first problem of a pydantic error as our one line; says how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    parts, table = _as_written(cls, first["loc"])
    key = ".".join(parts) or "(whole table)"
    shown = _shown(first.get("input"))
    kind = first["type"]
    if kind == "extra_forbidden":
        known = list(getattr(table, "model_fields", {}))
        said = f"unknown key; {nearest(str(first['loc'][-1]), known)}" if known else "unknown key"
    elif kind == "missing":
        said = "is required and missing"
    elif kind in ("float_type", "int_type") and isinstance(first.get("input"), str):
        said = f"{shown} is a string; write the number without quotes"
    elif kind == "value_error":
        said = str(first["msg"]).removeprefix("Value error, ")
    elif kind == "literal_error":
        expected = str(first.get("ctx", {}).get("expected", ""))
        names = [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]
        said = f"{shown} is not one of {', '.join(names)}; {nearest(str(first.get('input')), names)}"
    else:
        said = f"{_lower(str(first['msg']))}, got {shown}"
    more = (
        f" ({len(problems) - 1} more problem{'s' if len(problems) > 2 else ''} after this one)"
        if len(problems) > 1
        else ""
    )
    return f"{where}: {key}: {said}{more}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _as_written(cls: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """The parts of `loc` that a user wrote, without the names of a union's members; and the table that holds the last."""
    model: Any = cls
    parts: list[str] = []
    members: dict[str, Any] = {}
    for place, part in enumerate(loc):
        if part in members:
            model = members[str(part)]
        else:
            parts.append(str(part))
        members = {}
        field = getattr(model, "model_fields", {}).get(part)
        if field is None or place == len(loc) - 1:
            continue
        if isinstance(field.discriminator, str):
            found = [one for one in get_args(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
            members = {one.model_fields[field.discriminator].default: one for one in found}
        model = _model_in(field.annotation) or model
    return parts, model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
