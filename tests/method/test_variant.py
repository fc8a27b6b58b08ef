"""Variant is a value: what is wrong is refused in one line, what is right survives a round trip."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import ConfigError
from oelm.method.variant import (
    ADDONS,
    BIASES,
    FREEZES,
    INITS,
    NAMED,
    ORDERS,
    ROLES,
    SCOPES,
    Thaw,
    Variant,
    as_variant,
    changed,
    name_of,
    select_layers,
    variants,
)


NAMES = [
    "baseline",
    "oelm-freeze",
    "oelm-random",
    "oelm-global",
    "orth-trained",
    "gauss-frozen",
    "keep-frozen",
    "orthogonalize-frozen",
    "q-only",
    "k-only",
    "last-2-trained",
    "progressive",
    "qk-ffn",
    "tied-shift",
    "slices-shift",
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**63]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
    st.binary(max_size=4),
    st.sampled_from([*ROLES, *INITS, *SCOPES, *FREEZES, *ADDONS, "all", "last:2", "every:0", "first:" + "9" * 5000]),
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=6), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)
FIELDS = ["roles", "init", "scope", "gain", "std", "tie", "freeze", "layers", "thaw", "addons", "biases", "cross"]


def test_the_named_variants_are_there_and_keep_their_names() -> None:
    assert list(variants()) == NAMES
    for name, variant in variants().items():
        assert name_of(variant) == name
        assert as_variant(name) is variant
        assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant
    assert name_of(Variant(gain=2.0)) == "custom"
    assert len(set(variants().values())) == len(NAMES)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), junk, max_size=4))
def test_junk_is_a_config_error_or_a_variant(data: dict[str, Any]) -> None:
    try:
        variant = Variant.from_dict(data)
    except ConfigError:
        return
    assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant
    hash(variant)


@settings(max_examples=200, deadline=None)
@given(junk)
def test_junk_in_place_of_a_variant(value: Any) -> None:
    for make in (as_variant, Variant.from_dict, lambda v: Variant.from_dict({"base": v})):
        try:
            make(value)
        except ConfigError:
            continue


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["order", "start", "end", "x"]), junk, max_size=4))
def test_junk_in_a_thaw(data: dict[str, Any]) -> None:
    try:
        thaw = Variant.from_dict({"thaw": data}).thaw
    except ConfigError:
        return
    assert isinstance(thaw, Thaw)
    assert thaw.order in ORDERS
    assert 0 <= thaw.start <= thaw.end


@given(
    st.one_of(
        st.sampled_from(["all", "none"]),
        st.tuples(st.sampled_from(["first", "last", "every", "except-first", "except-last"]), st.integers(1, 50)).map(
            lambda t: f"{t[0]}:{t[1]}"
        ),
        st.lists(st.integers(-50, 50), unique=True, max_size=6).map(tuple),
    ),
    st.integers(1, 48),
)
def test_layer_selections(layers: Any, count: int) -> None:
    """Against a definition by set arithmetic."""
    everything = list(range(count))
    try:
        found = select_layers(layers, count)
    except ConfigError:
        if isinstance(layers, str):
            assert int(layers.partition(":")[2]) > count
        else:
            assert any(not -count <= i < count for i in layers)
        return
    if isinstance(layers, tuple):
        assert set(found) == {everything[i] for i in layers}
    else:
        kind, _, number = layers.partition(":")
        n = int(number or 0)
        expected = {
            "all": everything,
            "none": [],
            "first": [i for i in everything if i < n],
            "last": [i for i in everything if i >= count - n],
            "every": [i for i in everything if n and (i + 1) % n == 0],
            "except-first": [i for i in everything if i >= n],
            "except-last": [i for i in everything if i < count - n],
        }[kind]
        assert list(found) == expected
    assert list(found) == sorted(set(found))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init": "ortogonal"}, "did you mean 'orthogonal'"),
        ({"freeze": "kq"}, "not one of none, q, k, qk"),
        ({"gain": -1.0}, "must be above 0"),
        ({"gain": 0}, "must be above 0"),
        ({"gain": math.nan}, "finite number"),
        ({"gain": True}, "finite number"),
        ({"gain": 10**400}, "finite number"),
        ({"std": 0.02}, "belongs to init"),
        ({"init": "gaussian", "std": 0.02, "gain": 2.0}, "give one of the two"),
        ({"init": "keep", "gain": 2.0}, "leaves the weights as they are"),
        ({"tie": True, "roles": ["q"]}, "both q and k"),
        ({"init": "slices", "freeze": "none"}, "replaces both projections"),
        ({"turn": 1}, 'belongs to init = "slices"'),
        ({"init": "slices", "turn": -1}, "whole number of heads"),
        ({"init": "slices", "turn": True}, "whole number of heads"),
        ({"init": "slices", "thaw": {}}, "no matrices that could thaw"),
        ({"freeze": "none", "thaw": {}}, "nothing is frozen"),
        ({"roles": ["q", "q"]}, "names one thing twice"),
        ({"roles": "q"}, "expected a list"),
        ({"roles": []}, "names nothing"),
        ({"tie": True, "freeze": "k"}, "'k' alone cannot be frozen"),
        ({"layers": "last:0"}, "is not all"),
        ({"layers": [0, 0]}, "one layer twice"),
        ({"layers": [True]}, "whole numbers"),
        ({"thaw": {"order": "top_down"}}, "did you mean 'top-down'"),
        ({"thaw": {"start": 0.5, "end": 0.25}}, "is before start"),
        ({"thaw": {"start": 10, "end": 0.5}}, "both be steps"),
        ({"thaw": {"start": -1, "end": 5}}, "neither a step"),
        ({"frozen": True}, "did you mean"),
        ({"base": "oelm-freez"}, "did you mean 'oelm-freeze'"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Variant.from_dict(settings)


def test_wrong_names_of_fields_are_named_too() -> None:
    with pytest.raises(ConfigError, match=r"variant.freez: unknown key; did you mean 'freeze'"):
        Variant(freez="qk")
    with pytest.raises(ConfigError, match=r"variant.thaw.begin: unknown key; known: end, order, start"):
        Thaw(begin=3)
    with pytest.raises(ConfigError, match=r"given by name, as in Variant\(roles="):
        Variant(*["qk"])
    assert copy.deepcopy(Variant(gain=2.0)) == Variant(gain=2.0)


@pytest.mark.parametrize("field", FIELDS)
def test_numbers_too_long_to_print(field: str) -> None:
    for value in (10**5000, [10**5000], (-(10**5000),), {"start": 10**5000}):
        with pytest.raises(ConfigError):
            Variant.from_dict({field: value})


def test_base_and_changes() -> None:
    variant = Variant.from_dict({"base": "progressive", "gain": 2.0})
    assert variant == changed(NAMED["progressive"][1], gain=2.0)
    assert variant.frozen_roles == ("q", "k")
    assert Variant.from_dict({"init": "orthogonalize", "gain": 2.0}).gain == 2.0


def test_what_a_variant_touches() -> None:
    touched = {name: variant.touches for name, variant in variants().items()}
    assert touched["baseline"] == ()
    assert touched["q-only"] == ("q",)
    assert touched["orth-trained"] == ("q", "k")
    assert touched["qk-ffn"] == ("q", "k", "ffn")
    assert touched["keep-frozen"] == ("q", "k")
    assert set(BIASES) == {"follow", "train"}
