"""Carved splits leak no text, are stable, and duplicates are counted as by hand."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oelm.data.overlap import carve, duplicates, normal_form
from oelm.errors import ConfigError, DataError


texts = st.lists(st.text(alphabet="abAB .!?\u00e9", max_size=6), min_size=8, max_size=40)
shares = {"validation": 0.3}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Good film!<br /><br />Really.", "good  film really"),
        ("\ufb01ne \uff21", "fine a"),  # a ligature and a full-width letter
        ("STRASSE", "stra\u00dfe"),
        ("a_b", "a b"),
    ],
)
def test_near_equal_texts_have_one_normal_form(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


def test_texts_without_words_stay_apart() -> None:
    assert normal_form(":-)") != normal_form(":-(")


@settings(deadline=None)
@given(texts, st.integers(0, 2**63 - 1))
@example(["", "B", "??"], 60718).via("all three fell into validation")
def test_near_equal_texts_stay_on_one_side(keys: list[str], seed: int) -> None:
    if len({normal_form(key) for key in keys}) < 3:
        return
    sides = carve(keys, shares, seed)
    of: dict[str, set[str]] = {}
    for key, side in zip(keys, sides, strict=True):
        of.setdefault(normal_form(key), set()).add(side)
    assert all(len(found) == 1 for found in of.values())
    assert {"train", "validation"} == set(sides)


def test_a_row_keeps_its_side_when_others_come_and_go() -> None:
    keys = [f"text number {n}" for n in range(2000)]
    sides = carve(keys, {"validation": 0.1, "test": 0.1}, seed=5)
    again = carve(keys[::-3], {"validation": 0.1, "test": 0.1}, seed=5)
    assert again == sides[::-3]
    assert 140 < sides.count("validation") < 260
    assert 140 < sides.count("test") < 260
    assert carve(keys, {"validation": 0.1, "test": 0.1}, seed=6) != sides


@pytest.mark.parametrize("share", [0.01, 0.1, 0.33, 0.45])
def test_few_texts_fill_every_split(share: float) -> None:
    """However they fall: 200 seeds."""
    for seed in range(200):
        for keys in (["a", "b", "c"], ["a", "b", "c", "d"]):
            assert set(carve(keys, {"validation": share, "test": share}, seed)) == {"test", "train", "validation"}


def test_too_few_texts_are_refused() -> None:
    with pytest.raises(DataError, match=r"x\.csv: has 2 different texts, too few to take validation and test"):
        carve(["a", "b", "A!"], {"validation": 0.1, "test": 0.1}, seed=0, where="x.csv")


@pytest.mark.parametrize("wrong", [{"validation": 0.0}, {"validation": 0.6, "test": 0.4}])
def test_shares_must_leave_something(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="shares of carved splits"):
        carve(["a", "b", "c"], wrong, seed=0)


def test_duplicates_by_hand() -> None:
    found = duplicates({"train": ["One.", "one", "two", "two"], "test": ["ONE", "two", "two", "three"]})
    assert found["within"] == {"train": {"exact": 1, "normalised": 2}, "test": {"exact": 1, "normalised": 1}}
    assert found["between"] == {"train & test": {"exact": 2, "normalised": 3}}  # rows of test that train has
