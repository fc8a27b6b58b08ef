"""Rows as examples: what is accepted, and that every refusal names the file, the row and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from oelm.data.tables import Labels, label_names, labelled, questions, tag_names, tagged
from oelm.errors import DataError


WHERE = "reviews.csv"
SENTIMENT = Labels(("negative", "positive"))


@pytest.mark.parametrize("value", [1, 1.0, "1", " 1 ", True, "positive"])
def test_a_label_is_a_number_or_a_name(value: Any) -> None:
    assert SENTIMENT.number(value, "x") == 1


@pytest.mark.parametrize("value", [2, -1, "2", "neutral", None, 0.5, float("nan"), float("inf"), "", "9" * 5000, [1]])
def test_unknown_labels_name_row_and_what_is_allowed(value: Any) -> None:
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": value}]
    with pytest.raises(
        DataError, match=r"^reviews\.csv, row 2: label .* is not known; allowed: 0 to 1 or a name"
    ) as error:
        labelled(rows, SENTIMENT, WHERE)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_a_near_miss_is_named() -> None:
    with pytest.raises(DataError, match="did you mean 'positive'"):
        SENTIMENT.number("positve", "x")


def test_a_users_numbers_are_names() -> None:
    labels = Labels(("1", "2", "10"), own=True)
    assert [labels.number(value, "x") for value in (1, "2", 10.0, " 10 ")] == [0, 1, 2, 2]
    for unseen in (0, 3, "0", -1, None, "one"):
        with pytest.raises(DataError, match=r"^x: label .* is not known; allowed: those of train"):
            labels.number(unseen, "x")


def test_another_order_and_rows_without_a_label() -> None:
    labels = Labels(("a", "b", "c"), order=("c", "a", "b"), unlabelled=-1)
    found = labelled([{"text": str(n), "label": n} for n in (0, 1, 2, -1)], labels, WHERE)
    assert found.labels == [2, 0, 1]
    assert found.texts == ["0", "1", "2"]
    assert found.unlabelled == 1
    assert labels.number("c", "x") == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": None, "label": 0}, "row 1: text is None; expected text"),
        ({"text": 3, "label": 0}, "row 1: text is 3; expected text"),
        ({"text": "a\x00b", "label": 0}, "row 1: text holds a NUL character"),
        ({"text": "a\ud800b", "label": 0}, "row 1: text holds half a surrogate pair at 1"),
        ({"text": "a", "text2": [], "label": 0}, r"row 1: text2 is \[\]; expected text"),
    ],
)
def test_texts_are_texts(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        labelled([row], SENTIMENT, WHERE)


def test_a_split_without_labels_is_refused() -> None:
    with pytest.raises(DataError, match="has 2 rows and none with a label"):
        labelled([{"text": "a", "label": -1}] * 2, Labels(("x", "y"), unlabelled=-1), WHERE)


def test_a_users_labels_come_from_the_training_rows() -> None:
    assert label_names([{"label": n} for n in (10, 2, "1")], WHERE) == ("1", "2", "10")
    assert label_names([{"label": n} for n in ("b", "a", "b")], WHERE) == ("a", "b")
    with pytest.raises(DataError, match="has 1 different label"):
        label_names([{"label": 1}, {"label": "1"}], WHERE)
    with pytest.raises(DataError, match="row 2: label None is neither"):
        label_names([{"label": 1}, {"label": None}], WHERE)
    with pytest.raises(DataError, match="more than 1000 different labels; is 'label' the right column"):
        label_names([{"label": n} for n in range(2000)], WHERE)


def test_tags_as_lists_json_or_words() -> None:
    rows = [
        {"tokens": ["Anna", "sings"], "tags": ["B-per", "O"]},
        {"tokens": '["Anna", "sings"]', "tags": "B-per O"},
        {"tokens": "Anna sings", "tags": [1, 0]},
        {"tokens": [], "tags": []},
    ]
    found = tagged(rows, ("O", "B-per", "I-per"), WHERE)
    assert found.words == [["Anna", "sings"]] * 3
    assert found.tags == [["B-per", "O"]] * 3


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "row 1: 1 tags for 2 words"),
        ({"tokens": ["a"], "tags": ["B-pre"]}, "row 1: tag 'B-pre' is not known; did you mean 'B-per'"),
        ({"tokens": ["a"], "tags": [7]}, "row 1: tag 7 is not known"),
        ({"tokens": 5, "tags": []}, "row 1: tokens is 5; expected a list"),
        ({"tokens": "[1,", "tags": []}, "row 1: tokens is '\\[1,', which is not JSON"),
        ({"tokens": [None], "tags": ["O"]}, "row 1: tokens is None; expected text"),
    ],
)
def test_tags_that_do_not_fit_are_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        tagged([row], ("O", "B-per", "I-per"), WHERE)


def test_a_users_tags_are_iob2() -> None:
    assert tag_names([{"tags": ["O", "I-b"]}, {"tags": ["B-a"]}], WHERE) == ("O", "B-a", "I-a", "B-b", "I-b")
    with pytest.raises(DataError, match="row 1: tag 'person' is not IOB2"):
        tag_names([{"tags": ["person"]}], WHERE)
    with pytest.raises(DataError, match="has no entity"):
        tag_names([{"tags": ["O"]}], WHERE)


def question(**more: Any) -> dict[str, Any]:
    return {"context": "The cat sat on the mat.", "question": "Who?", "answers": ["cat"]} | more


@pytest.mark.parametrize(
    "answers",
    [
        ["cat"],
        "cat",
        {"text": ["cat"], "answer_start": [4]},
        '["cat"]',
        '{"text": ["cat"], "answer_start": [4]}',
    ],
)
def test_answers_in_every_form(answers: Any) -> None:
    (found,) = questions([question(answers=answers)], WHERE)
    assert found.answers == ("cat",)
    assert found.starts == (4,)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"answers": ["dog"]}, "row 1: the answer 'dog' is not in its context"),
        ({"answers": ["cat"], "starts": [5]}, "row 1: the answer 'cat' is not in its context at 5"),
        ({"answers": ["mat"], "starts": [-4]}, "row 1: the answer 'mat' is not in its context at -4"),
        ({"answers": ["cat"], "starts": [4, 5]}, "row 1: 2 answer starts for 1 answers"),
        ({"answers": []}, "row 1: answers are \\[\\]"),
        ({"answers": [""]}, "row 1: an answer is empty"),
        ({"answers": None}, "row 1: answers are None"),
        ({"context": None}, "row 1: context is None"),
    ],
)
def test_answers_that_are_nowhere_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        questions([question(**more)], WHERE)


def test_ids_are_used_once() -> None:
    with pytest.raises(DataError, match="row 2: the id 'a' is there twice"):
        questions([question(id="a"), question(id="a")], WHERE)
