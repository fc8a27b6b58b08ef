"""Variant: what is initialised, tied and frozen, where and until when. A value; no torch here.

The named variants are the table at the end. No learning rate belongs to a variant.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from oelm.errors import ConfigError, nearest


ROLES = ("q", "k", "v", "ffn")
INITS = ("keep", "orthogonal", "orthogonalize", "gaussian", "slices")
SCOPES = ("head", "matrix")
FREEZES = ("none", "q", "k", "qk", "qk+ffn")
BIASES = ("follow", "train")
ORDERS = ("top-down", "bottom-up", "at-once")
ADDONS = ("shift-keys", "head-gain", "channel-gain", "query-mix")

_LAYERS = re.compile(r"(all|none)|(first|last|every|except-first|except-last):([1-9][0-9]{0,5})")
_LARGEST = sys.float_info.max


def _one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        hint = f"; {hint}" if hint.startswith("did") else ""
        raise ConfigError(f"variant.{what}: {_shown(value)} is not one of {', '.join(allowed)}{hint}")


def _number(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise ConfigError(f"variant.{what}: expected a finite number, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    """A value for a message: short, and never itself an error (Python refuses to print very long integers)."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 80 else text[:77] + "…"


class _Named:
    """A value whose fields are given by name; a wrong name is one line with the nearest right one."""

    def __new__(cls, *unnamed: object, **values: object) -> Self:
        where = "variant.thaw" if cls.__name__ == "Thaw" else "variant"
        if unnamed:
            raise ConfigError(f"{where}: fields are given by name, as in {cls.__name__}({_known(cls)[0]}=...)")
        _refuse_unknown(values, _known(cls), where)
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class Thaw(_Named):
    """When frozen layers begin to train.

    `start` and `end` are steps when whole numbers, fractions of the budget when floats in [0, 1].
    Between them the layers thaw one by one in `order`; `at-once` thaws all of them at `start`.
    """

    order: str = "top-down"
    start: int | float = 0.25
    end: int | float = 0.75

    def __post_init__(self) -> None:
        _one_of("thaw.order", self.order, ORDERS)
        for name in ("start", "end"):
            value = getattr(self, name)
            number = _number(f"thaw.{name}", value)
            if number < 0 or (isinstance(value, float) and number > 1):
                raise ConfigError(f"variant.thaw.{name}: {value!r} is neither a step ≥ 0 nor a fraction in [0, 1]")
        if isinstance(self.start, int) != isinstance(self.end, int):
            raise ConfigError("variant.thaw: start and end must both be steps (whole numbers) or both fractions")
        if self.end < self.start:
            raise ConfigError(f"variant.thaw: end {self.end} is before start {self.start}")


@dataclass(frozen=True, kw_only=True)
class Variant(_Named):
    """One treatment of attention's projections.

    roles   which matrices `init` draws anew (or `keep`s)
    init    keep | orthogonal | orthogonalize (QR of the present weights) | gaussian | slices (no matrix at all)
    scope   head: every head's block on its own; matrix: the whole matrix at once
    gain    relative to the norm-matched draw, whose entries have variance 1/width; `std` gives a raw one instead
    tie     K uses Q's matrix
    freeze  which matrices never train (or train from `thaw` on)
    layers  where matrices are drawn, tied and frozen: all | first:n | last:n | every:n | except-first:n | except-last:n | a list of layer numbers
            (numbers count from 0, negative ones from the end; every:2 is the second layer, the fourth, and so on)
    turn    slices only: a head's key reads the slice of the head so many further on, so that it can ask for other than it offers
    addons  few trained scalars beside the matrices of every layer: shift-keys, head-gain, channel-gain; query-mix (a matrix per head)
    biases  follow: a bias is zeroed by a fresh draw and frozen with its matrix; train: biases are left alone
    cross   whether cross-attention is treated too
    """

    roles: tuple[str, ...] = ("q", "k")
    init: str = "orthogonal"
    scope: str = "head"
    gain: float = 1.0
    std: float | None = None
    tie: bool = False
    turn: int = 0
    freeze: str = "qk"
    layers: str | tuple[int, ...] = "all"
    thaw: Thaw | None = None
    addons: tuple[str, ...] = ()
    biases: str = "follow"
    cross: bool = False

    def __post_init__(self) -> None:
        for name in ("roles", "addons", "layers"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        thaw: object = self.thaw
        if isinstance(thaw, Mapping):
            object.__setattr__(self, "thaw", _build(Thaw, thaw, "variant.thaw"))
        self._check()

    def _check(self) -> None:
        for name, allowed in (("roles", ROLES), ("addons", ADDONS)):
            values = getattr(self, name)
            if not isinstance(values, tuple):
                raise ConfigError(f"variant.{name}: expected a list of names, got {_shown(values)}")
            for value in values:
                _one_of(name, value, allowed)
            if len(set(values)) != len(values):
                raise ConfigError(f"variant.{name}: {_shown(list(values))} names one thing twice")
        _one_of("init", self.init, INITS)
        _one_of("scope", self.scope, SCOPES)
        _one_of("freeze", self.freeze, FREEZES)
        _one_of("biases", self.biases, BIASES)
        for name in ("tie", "cross"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"variant.{name}: expected true or false, got {_shown(getattr(self, name))}")
        if self.thaw is not None and not isinstance(self.thaw, Thaw):
            raise ConfigError(f"variant.thaw: expected a table with order, start and end, got {_shown(self.thaw)}")
        if _number("gain", self.gain) <= 0:
            raise ConfigError(f"variant.gain: must be above 0, got {self.gain!r}")
        if self.std is not None:
            if _number("std", self.std) <= 0:
                raise ConfigError(f"variant.std: must be above 0, got {self.std!r}")
            if self.init != "gaussian":
                raise ConfigError(f'variant.std: belongs to init = "gaussian", not to {self.init!r}; use gain')
            if self.gain != 1.0:
                raise ConfigError("variant.std and variant.gain: give one of the two")
        if isinstance(self.turn, bool) or not isinstance(self.turn, int) or not 0 <= self.turn < 10**6:
            raise ConfigError(f"variant.turn: expected a whole number of heads, 0 or more, got {_shown(self.turn)}")
        parse_layers(self.layers)
        self._check_pairs()

    def _check_pairs(self) -> None:
        if not self.roles and self.init != "keep":
            raise ConfigError(f'variant.roles: names nothing that init = "{self.init}" could draw; use init = "keep"')
        if self.tie and not {"q", "k"} <= set(self.roles):
            raise ConfigError("variant.tie: K can use Q's matrix only when roles has both q and k")
        if self.tie and self.freeze in ("q", "k"):
            raise ConfigError(
                f'variant.freeze: under tie K is Q\'s matrix, so {self.freeze!r} alone cannot be frozen; use "qk" or "none"'
            )
        if self.tie and self.init == "slices":
            raise ConfigError(
                'variant.tie: init = "slices" has no matrices to tie; its heads read one slice for both already'
            )
        if self.turn and self.init != "slices":
            raise ConfigError(f'variant.turn: belongs to init = "slices", not to {self.init!r}; leave it at 0')
        if self.init == "slices":
            if set(self.roles) != {"q", "k"} or self.freeze != "qk":
                raise ConfigError(
                    'variant.init: "slices" replaces both projections: it needs roles = ["q", "k"] and freeze = "qk"'
                )
            if self.thaw is not None:
                raise ConfigError('variant.thaw: init = "slices" has no matrices that could thaw')
            if self.gain != 1.0:
                raise ConfigError('variant.gain: init = "slices" has no matrices to scale; use the head-gain add-on')
        if self.thaw is not None and self.freeze == "none":
            raise ConfigError('variant.thaw: nothing is frozen (freeze = "none"), so nothing can thaw')
        if "ffn" in self.roles and self.init not in ("keep",):
            raise ConfigError('variant.roles: "ffn" has no heads to draw; freeze it as it is with freeze = "qk+ffn"')
        if self.init == "keep" and self.gain != 1.0:
            raise ConfigError('variant.gain: init = "keep" leaves the weights as they are; leave gain at 1')

    @property
    def frozen_roles(self) -> tuple[str, ...]:
        """The roles that `freeze` names."""
        return {"none": (), "q": ("q",), "k": ("k",), "qk": ("q", "k"), "qk+ffn": ("q", "k", "ffn")}[self.freeze]

    @property
    def touches(self) -> tuple[str, ...]:
        """Roles that are drawn, tied or frozen: empty for the baseline."""
        drawn = self.roles if self.init != "keep" or self.tie else ()
        return tuple(r for r in ROLES if r in drawn or r in self.frozen_roles)

    def layer_numbers(self, count: int) -> tuple[int, ...]:
        """The layers of a stack of `count` that this variant covers."""
        return select_layers(self.layers, count)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `Variant.from_dict` reads back."""
        data = asdict(self)
        data["roles"], data["addons"] = list(self.roles), list(self.addons)
        if not isinstance(self.layers, str):
            data["layers"] = list(self.layers)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Variant:
        """A variant from plain data; `base` may name a variant that the other keys change."""
        given: object = data
        if not isinstance(given, Mapping):
            raise ConfigError(f"variant: expected a table, got {_shown(given)}")
        values = dict(given)
        base = values.pop("base", None)
        start = {} if base is None else named(base).to_dict()
        found = _build(cls, start | values, "variant")
        assert isinstance(found, cls)
        return found


def _refuse_unknown(data: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in data:
        if key not in known:
            name = key if isinstance(key, str) else _shown(key)
            raise ConfigError(f"{where}.{name}: unknown key; {nearest(name, known)}")


def _build(cls: type[Any], data: Mapping[str, Any], where: str) -> Any:
    _refuse_unknown(data, _known(cls), where)
    return cls(**data)


def _known(cls: type[Any]) -> list[str]:
    return [f.name for f in fields(cls)]


def parse_layers(layers: object) -> None:
    """Refuse a layer selection that can never be right."""
    if isinstance(layers, str):
        if not _LAYERS.fullmatch(layers):
            raise ConfigError(
                f"variant.layers: {_shown(layers)} is not all, none, first:n, last:n, every:n, except-first:n, except-last:n or a list of layer numbers"
            )
        return
    if not isinstance(layers, tuple) or not all(
        isinstance(i, int) and not isinstance(i, bool) and abs(i) < 10**6 for i in layers
    ):
        raise ConfigError(f"variant.layers: expected a selection or a list of whole numbers, got {_shown(layers)}")
    if len(set(layers)) != len(layers):
        raise ConfigError(f"variant.layers: {_shown(list(layers))} names one layer twice")


def select_layers(layers: str | tuple[int, ...], count: int) -> tuple[int, ...]:
    """Layer numbers out of `count`; negative numbers count from the end."""
    parse_layers(layers)
    if not isinstance(layers, str):
        for i in layers:
            if not -count <= i < count:
                raise ConfigError(
                    f"variant.layers: layer {_shown(i)} is out of range for {count} layers (0 to {count - 1})"
                )
        return tuple(sorted({i % count for i in layers}))
    every = tuple(range(count))
    kind, _, text = layers.partition(":")
    if kind == "all":
        return every
    if kind == "none":
        return ()
    n = int(text)
    if n > count:
        raise ConfigError(f"variant.layers: {layers!r} asks for more than the {count} layers there are")
    return {
        "first": every[:n],
        "last": every[count - n :],
        "every": every[n - 1 :: n],
        "except-first": every[n:],
        "except-last": every[: count - n],
    }[kind]


_REPAIRED = Variant(tie=True, addons=("shift-keys", "head-gain"))

NAMED: dict[str, tuple[str, Variant]] = {
    "baseline": ("standard initialisation, everything trains", Variant(init="keep", freeze="none")),
    "oelm-freeze": ("orthogonal per head, Q and K frozen: the original's method", Variant()),
    "oelm-random": (
        "N(0, 0.02²), frozen: the original's control, norm NOT matched",
        Variant(init="gaussian", std=0.02),
    ),
    "oelm-global": ("orthogonal as one whole matrix, frozen: the original's older form", Variant(scope="matrix")),
    "orth-trained": ("orthogonal per head at the start, everything trains", Variant(freeze="none")),
    "gauss-frozen": ("Gaussian of matched norm, frozen: the fair control", Variant(init="gaussian")),
    "keep-frozen": ("the weights as they are, frozen", Variant(init="keep")),
    "orthogonalize-frozen": (
        "QR of the present weights per head, frozen: what the original did to BERT",
        Variant(init="orthogonalize"),
    ),
    "q-only": ("Q orthogonal and frozen, K trains as usual", Variant(roles=("q",), freeze="q")),
    "k-only": ("K orthogonal and frozen, Q trains as usual", Variant(roles=("k",), freeze="k")),
    "last-2-trained": ("orthogonal and frozen but for the last two layers", Variant(layers="except-last:2")),
    "progressive": (
        "orthogonal and frozen, thawing from the top between 25 % and 75 % of the budget",
        Variant(thaw=Thaw()),
    ),
    "qk-ffn": ("orthogonal Q and K frozen, the feed-forward frozen as it is", Variant(freeze="qk+ffn")),
    "tied-shift": ("K uses Q's orthogonal matrix, frozen, with shifted keys and a gain per head", _REPAIRED),
    "slices-shift": (
        "no Q/K matrices: each head reads its own slice of the input, with shifted keys and a gain per channel",
        Variant(init="slices", addons=("shift-keys", "channel-gain")),
    ),
}


def named(name: str) -> Variant:
    """The variant of that name, or an error that says the nearest one."""
    if not isinstance(name, str) or name not in NAMED:
        raise ConfigError(
            f"variant {_shown(name)} is unknown; {nearest(name if isinstance(name, str) else _shown(name), NAMED)}"
        )
    return NAMED[name][1]


def variants() -> dict[str, Variant]:
    """The named variants."""
    return {name: variant for name, (_, variant) in NAMED.items()}


def as_variant(value: Variant | str | Mapping[str, Any]) -> Variant:
    """A Variant from itself, a name or plain data."""
    if isinstance(value, Variant):
        return value
    if isinstance(value, str):
        return named(value)
    if isinstance(value, Mapping):
        return Variant.from_dict(value)
    raise ConfigError(f"variant: expected a name, a table or a Variant, got {type(value).__name__}")


def name_of(variant: Variant) -> str:
    """The name of a named variant, else 'custom'."""
    return next((name for name, (_, known) in NAMED.items() if known == variant), "custom")


def changed(variant: Variant, **values: Any) -> Variant:
    """A copy with some fields changed, checked again."""
    return replace(variant, **values)
