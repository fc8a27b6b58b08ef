"""Scores of predictions: accuracy, entity F1 (IOB2, exact spans, micro), exact match and F1 of answers (SQuAD).

Owns the arithmetic only: plain sequences and arrays in, plain numbers out. It knows no data set, no model and no split.
Refuses predictions and truths of different lengths.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from oelm.errors import DataError


Span = tuple[str, int, int]  # entity type, first word, one past the last word


def _same_length(truth: Sequence[object], predicted: Sequence[object], what: str) -> None:
    if len(truth) != len(predicted):
        raise DataError(f"{len(predicted)} predictions for {len(truth)} {what}; score the same examples on both sides")


def accuracy(truth: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """The share of equal entries."""
    left, right = np.asarray(truth), np.asarray(predicted)
    if left.shape != right.shape or left.size == 0:
        raise DataError(
            f"accuracy: {right.shape} predictions for {left.shape} truths; both must be equal and not empty"
        )
    return float(np.mean(left == right))


def macro_f1(truth: npt.ArrayLike, predicted: npt.ArrayLike, labels: int) -> float:
    """F1 of each label that occurs on either side, averaged without weights."""
    left, right = np.asarray(truth), np.asarray(predicted)
    scores = []
    for label in range(labels):
        true, said = left == label, right == label
        if not (true.any() or said.any()):
            continue
        scores.append(2.0 * float(np.sum(true & said)) / float(np.sum(true) + np.sum(said)))
    return float(np.mean(scores)) if scores else 0.0


def entity_spans(tags: Sequence[str]) -> list[Span]:
    """The entities of one sentence in IOB2.

    As conlleval and seqeval read it by default: an I- that continues no entity of its own type starts a new one.
    """
    spans: list[Span] = []
    kind, start = "", 0
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, of = tag.partition("-")
        continues = prefix == "I" and of == kind and kind != ""
        if continues:
            continue
        if kind:
            spans.append((kind, start, position))
        kind, start = ("", 0) if prefix == "O" else (of, position)
    return spans


def entity_scores(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Micro precision, recall and F1 over exact spans, and the share of equal tags ("accuracy").

    Without any entity on either side F1 is 0, as in conlleval.
    """
    _same_length(truth, predicted, "sentences")
    right = said = true = equal = words = 0
    for number, (wanted, given) in enumerate(zip(truth, predicted, strict=True)):
        if len(wanted) != len(given):
            raise DataError(f"sentence {number}: {len(given)} predicted tags for {len(wanted)} words")
        wanted_spans, given_spans = set(entity_spans(wanted)), set(entity_spans(given))
        right += len(wanted_spans & given_spans)
        said += len(given_spans)
        true += len(wanted_spans)
        equal += sum(a == b for a, b in zip(wanted, given, strict=True))
        words += len(wanted)
    precision = right / said if said else 0.0
    recall = right / true if true else 0.0
    f1 = 2 * right / (said + true) if said + true else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, "accuracy": equal / words if words else 0.0}


_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normal_answer(text: str) -> str:
    """The official normalisation of SQuAD v1.1: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_match(given: str, answers: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of one answer: the best over the reference answers."""
    return (
        max((float(normal_answer(given) == normal_answer(answer)) for answer in answers), default=0.0),
        max((_overlap_f1(given, answer) for answer in answers), default=0.0),
    )


def _overlap_f1(given: str, answer: str) -> float:
    said, true = normal_answer(given).split(), normal_answer(answer).split()
    common = sum((Counter(said) & Counter(true)).values())
    return 2 * common / (len(said) + len(true)) if common else 0.0


def answer_scores(
    truth: Mapping[str, Sequence[str]], predicted: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Exact match and F1 in [0, 1], averaged over the questions of `truth`; and both per question.

    A question without a prediction counts as wrong, as in the official script.
    """
    if not truth:
        raise DataError("no question to score; the split is empty")
    each = {question: answer_match(predicted.get(question, ""), answers) for question, answers in truth.items()}
    exact = sum(pair[0] for pair in each.values()) / len(each)
    f1 = sum(pair[1] for pair in each.values()) / len(each)
    return {"exact_match": exact, "f1": f1}, each
