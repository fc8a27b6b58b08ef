"""Scores against independent references: scikit-learn, conlleval's rules on cases by hand, SQuAD's official arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support

from oelm.data.scores import (
    accuracy,
    answer_match,
    answer_scores,
    entity_scores,
    entity_spans,
    macro_f1,
    normal_answer,
)
from oelm.errors import DataError


TAGS = ("O", "B-per", "I-per", "B-loc", "I-loc")
labels = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=50)
sentences = st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1, max_size=20)


@settings(deadline=None)
@given(labels)
def test_accuracy_and_macro_f1_are_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    truth, said = (np.array(side) for side in zip(*pairs, strict=True))
    assert accuracy(truth, said) == pytest.approx(accuracy_score(truth, said))
    assert macro_f1(truth, said, 4) == pytest.approx(f1_score(truth, said, average="macro", zero_division=0.0))


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O O O", []),
        ("B-per I-per O B-loc", [("per", 0, 2), ("loc", 3, 4)]),
        ("B-per B-per I-per", [("per", 0, 1), ("per", 1, 3)]),
        ("B-per I-loc", [("per", 0, 1), ("loc", 1, 2)]),
        ("I-per I-per O", [("per", 0, 2)]),  # conlleval: an I- that continues nothing starts an entity
        ("O I-loc B-loc", [("loc", 1, 2), ("loc", 2, 3)]),
        ("B-creative-work I-creative-work", [("creative-work", 0, 2)]),
        ("", []),
    ],
)
def test_entity_spans_by_hand(tags: str, spans: list[tuple[str, int, int]]) -> None:
    assert entity_spans(tags.split()) == spans


def _slow_spans(tags: list[str]) -> set[tuple[str, int, int]]:
    """The definition, word for word: a span is maximal, of one type, and an I- joins the word before when of its type."""
    spans = set()
    for start in range(len(tags)):
        if tags[start] == "O":
            continue
        kind = tags[start][2:]
        begins = tags[start][0] == "B" or start == 0 or tags[start - 1][2:] != kind
        if not begins:
            continue
        end = start + 1
        while end < len(tags) and tags[end] == f"I-{kind}":
            end += 1
        spans.add((kind, start, end))
    return spans


@settings(deadline=None)
@given(st.lists(sentences, min_size=1, max_size=5))
def test_entity_scores_count_exact_spans(data: list[list[tuple[str, str]]]) -> None:
    truth = [[pair[0] for pair in sentence] for sentence in data]
    said = [[pair[1] for pair in sentence] for sentence in data]
    scores = entity_scores(truth, said)
    every_true = {(number, *span) for number, tags in enumerate(truth) for span in _slow_spans(tags)}
    every_said = {(number, *span) for number, tags in enumerate(said) for span in _slow_spans(tags)}
    union = sorted(every_true | every_said)
    if union:  # a span is a decision: scikit-learn's binary scores over all spans that occur on a side
        precision, recall, f1, _ = precision_recall_fscore_support(
            [span in every_true for span in union],
            [span in every_said for span in union],
            average="binary",
            zero_division=0.0,
        )
        assert scores["precision"] == pytest.approx(precision)
        assert scores["recall"] == pytest.approx(recall)
        assert scores["f1"] == pytest.approx(f1)
    flat = [pair for sentence in data for pair in sentence]
    assert scores["accuracy"] == pytest.approx(np.mean([a == b for a, b in flat]))


def test_entity_scores_by_hand() -> None:
    truth = [["B-per", "I-per", "O", "B-loc"], ["O", "B-loc"]]
    said = [["B-per", "I-per", "O", "B-per"], ["B-loc", "B-loc"]]
    scores = entity_scores(truth, said)
    assert scores["precision"] == 2 / 4
    assert scores["recall"] == 2 / 3
    assert scores["f1"] == pytest.approx(2 * 2 / 7)


def test_entity_scores_refuse_what_does_not_match() -> None:
    with pytest.raises(DataError, match="1 predictions for 2 sentences"):
        entity_scores([["O"], ["O"]], [["O"]])
    with pytest.raises(DataError, match="sentence 0: 2 predicted tags for 1 words"):
        entity_scores([["O"]], [["O", "O"]])


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("an A a the", ""),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("12-3", "123"),
        ("Caf\u00e9 \u2013 the bar", "caf\u00e9 \u2013 bar"),  # only ASCII punctuation goes, as in the official script
    ],
)
def test_normal_answer(text: str, normal: str) -> None:
    assert normal_answer(text) == normal


def test_answers_by_hand() -> None:
    assert answer_match("the Denver Broncos", ["Denver Broncos", "Broncos"]) == (1.0, 1.0)
    exact, f1 = answer_match("Denver Broncos team", ["Denver Broncos"])
    assert exact == 0.0
    assert f1 == pytest.approx(2 * (2 / 3) * 1.0 / (2 / 3 + 1.0))
    assert answer_match("cat cat", ["cat dog"])[1] == pytest.approx(0.5)  # words count as often as they occur in both
    assert answer_match("", ["x"]) == (0.0, 0.0)


def test_a_question_without_a_prediction_is_wrong() -> None:
    scores, each = answer_scores({"a": ["x"], "b": ["y"]}, {"a": "x"})
    assert scores == {"exact_match": 0.5, "f1": 0.5}
    assert each["b"] == (0.0, 0.0)


def test_accuracy_refuses_other_shapes() -> None:
    with pytest.raises(DataError, match="predictions for"):
        accuracy([1, 2], [1])
