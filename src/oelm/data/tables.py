"""Rows of a table as examples of a task: labelled texts, tagged words, questions with answers.

Owns the checks of values; reading files belongs to `oelm.data.reading`. Refuses, with the file and the row (counted from 1,
without the header): a text that is none, an unknown label, tags that do not match their words, an answer that is nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oelm.errors import DataError, nearest


Row = Mapping[str, Any]

MAX_LABELS = 1000
_LONGEST_NUMBER = 18  # digits of a label; more is no label


@dataclass(frozen=True)
class Labelled:
    """Texts, or pairs of texts, with the number of a label each."""

    texts: list[str]
    seconds: list[str] | None
    labels: list[int]
    unlabelled: int = 0  # rows that were left out because the set gives them no label


@dataclass(frozen=True)
class Tagged:
    """Sentences of words with a tag each."""

    words: list[list[str]]
    tags: list[list[str]]


@dataclass(frozen=True)
class Question:
    """A question on a context, its reference answers, and where in the context each starts."""

    key: str
    group: str  # questions of one article stay in one split
    context: str
    question: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    ambiguous: bool = False  # the place of the answer is a guess


@dataclass(frozen=True)
class Labels:
    """Names of labels in our order, and how a file writes them."""

    names: tuple[str, ...]
    order: tuple[str, ...] | None = None  # what the file's numbers mean, where that is not our order
    unlabelled: int | None = None  # the file's number for a row without a label
    own: bool = False  # the names are a user's, who may call classes 1 to 4: a number is a name and no place
    _numbers: dict[str, int] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._numbers.update({name: number for number, name in enumerate(self.names)})

    def number(self, value: Any, place: str) -> int | None:
        """Our number of a label; None for a row without one."""
        written = _as_number(value)
        theirs = self.order or self.names
        if isinstance(value, str) and value in self._numbers:
            return self._numbers[value]
        if self.own:
            if written is not None and str(written) in self._numbers:
                return self._numbers[str(written)]
            raise DataError(
                f"{place}: label {_shown(value)} is not known; allowed: those of train, "
                f"{nearest(str(value)[:80], self.names)}"
            )
        if written is not None and written == self.unlabelled:
            return None
        if written is not None and 0 <= written < len(theirs):
            return self._numbers[theirs[written]]
        raise DataError(
            f"{place}: label {_shown(value)} is not known; allowed: 0 to {len(theirs) - 1} or a name, "
            f"{nearest(str(value)[:80], self.names)}"
        )


def labelled(rows: Iterable[Row], labels: Labels, where: str) -> Labelled:
    """Examples of classification; roles text, label and perhaps text2."""
    texts: list[str] = []
    seconds: list[str] = []
    numbers: list[int] = []
    dropped = count = 0
    for count, row in enumerate(rows, start=1):
        place = f"{where}, row {count}"
        number = labels.number(row["label"], place)
        if number is None:
            dropped += 1
            continue
        texts.append(_text(row["text"], place, "text"))
        if "text2" in row:
            seconds.append(_text(row["text2"], place, "text2"))
        numbers.append(number)
    if not numbers:
        raise DataError(f"{where}: has {count} rows and none with a label; a split needs labelled rows")
    return Labelled(texts, seconds if seconds else None, numbers, dropped)


def tagged(rows: Iterable[Row], names: Sequence[str], where: str) -> Tagged:
    """Sentences of tagging; roles tokens and tags, lists of one length. Tags are names, or numbers of `names`.

    In a CSV a cell holds a list as JSON, or its items with spaces between.
    """
    known = set(names)
    words: list[list[str]] = []
    tags: list[list[str]] = []
    for count, row in enumerate(rows, start=1):
        place = f"{where}, row {count}"
        sentence = [_text(word, place, "tokens") for word in _list(row["tokens"], place, "tokens")]
        given = [_tag(tag, names, known, place) for tag in _list(row["tags"], place, "tags")]
        if len(sentence) != len(given):
            raise DataError(f"{place}: {len(given)} tags for {len(sentence)} words; every word needs one tag")
        if sentence:
            words.append(sentence)
            tags.append(given)
    if not words:
        raise DataError(f"{where}: has no sentence; expected rows with tokens and tags")
    return Tagged(words, tags)


def questions(rows: Iterable[Row], where: str) -> list[Question]:
    """Examples of reading comprehension; roles context, question, answers, and perhaps id, title and starts.

    answers is a list of texts, one text, or {"text": [...], "answer_start": [...]} as on the hub. Without starts an
    answer is where it first occurs in its context.
    """
    found: list[Question] = []
    keys: set[str] = set()
    for count, row in enumerate(rows, start=1):
        place = f"{where}, row {count}"
        context = _text(row["context"], place, "context")
        question = _text(row["question"], place, "question")
        answers, starts = _answers(row, place)
        places = []
        for number, answer in enumerate(answers):
            start = int(starts[number]) if starts else context.find(answer)
            if start < 0 or context[start : start + len(answer)] != answer:
                raise DataError(
                    f"{place}: the answer {_shown(answer)} is not in its context"
                    + (f" at {start}" if starts else "")
                    + "; answers are copied out of the context, letter by letter"
                )
            places.append(start)
        key = str(row.get("id") or count - 1)
        if key in keys:
            raise DataError(f"{place}: the id {_shown(key)} is there twice; every question needs its own")
        keys.add(key)
        group = str(row.get("title") or context)
        guessed = bool(row.get("ambiguous"))
        found.append(Question(key, group, context, question, tuple(answers), tuple(places), guessed))
    if not found:
        raise DataError(f"{where}: has no question; expected rows with context, question and answers")
    return found


def label_names(rows: Iterable[Row], where: str) -> tuple[str, ...]:
    """The labels of a user's own training rows: numbers in order, else names in alphabetical order."""
    seen: dict[Any, None] = {}
    for count, row in enumerate(rows, start=1):
        value = row["label"]
        written = _as_number(value)
        if written is None and (not isinstance(value, str) or not value.strip()):
            raise DataError(f"{where}, row {count}: label {_shown(value)} is neither a name nor a whole number")
        seen[value if written is None else written] = None
        if len(seen) > MAX_LABELS:
            raise DataError(f"{where}: has more than {MAX_LABELS} different labels; is 'label' the right column?")
    if len(seen) < 2:
        raise DataError(f"{where}: has {len(seen)} different label; a classifier needs two or more")
    numbers = [value for value in seen if isinstance(value, int)]
    if len(numbers) == len(seen):
        return tuple(str(value) for value in sorted(numbers))
    return tuple(sorted(str(value) for value in seen))


def tag_names(rows: Iterable[Row], where: str) -> tuple[str, ...]:
    """The tags of a user's own training rows, O first; they must be names in IOB2."""
    seen: set[str] = set()
    for count, row in enumerate(rows, start=1):
        place = f"{where}, row {count}"
        for tag in _list(row["tags"], place, "tags"):
            if not isinstance(tag, str) or not (tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2)):
                raise DataError(f"{place}: tag {_shown(tag)} is not IOB2; use O, B-type and I-type")
            seen.add(tag)
        if len(seen) > MAX_LABELS:
            raise DataError(f"{where}: has more than {MAX_LABELS} different tags; is 'tags' the right column?")
    kinds = sorted({tag[2:] for tag in seen if tag != "O"})
    if not kinds:
        raise DataError(f"{where}: has no entity; every tag is O")
    return ("O", *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))


def _as_number(value: Any) -> int | None:
    """The whole number that a label is written as: 1, 1.0, true or "1" (as CSV has it)."""
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        text = value.strip()
        if text.removeprefix("-").isdecimal() and len(text) <= _LONGEST_NUMBER:
            return int(text)
    return None


def _tag(value: Any, names: Sequence[str], known: set[str], place: str) -> str:
    if isinstance(value, str) and value in known:
        return value
    number = _as_number(value)
    if number is not None and 0 <= number < len(names):
        return names[number]
    raise DataError(f"{place}: tag {_shown(value)} is not known; {nearest(str(value)[:80], names)}")


def _answers(row: Row, place: str) -> tuple[list[str], list[int]]:
    value: Any = row["answers"]
    starts: Any = row.get("starts")
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = _json(value, place, "answers")
    if isinstance(value, dict):
        value, starts = value.get("text"), value.get("answer_start", starts)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{place}: answers are {_shown(value)}; expected one or more texts of answers")
    answers = [_text(answer, place, "answers") for answer in value]
    if not all(answers):
        raise DataError(f"{place}: an answer is empty; expected words out of the context")
    starts = list(starts) if isinstance(starts, list | tuple) else []
    if starts and (len(starts) != len(answers) or not all(isinstance(s, int) for s in starts)):
        raise DataError(
            f"{place}: {len(starts)} answer starts for {len(answers)} answers; give a whole number for each"
        )
    return answers, starts


def _text(value: Any, place: str, role: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {role} is {_shown(value)}; expected text")
    if "\x00" in value:
        raise DataError(f"{place}: {role} holds a NUL character; clean the text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {role} holds half a surrogate pair at {error.start}; clean the text") from None
    return value


def _list(value: Any, place: str, role: str) -> list[Any]:
    if isinstance(value, str):
        value = _json(value, place, role) if value.lstrip().startswith("[") else value.split()
    if not isinstance(value, list | tuple):
        raise DataError(f"{place}: {role} is {_shown(value)}; expected a list (in CSV: JSON, or words with spaces)")
    return list(value)


def _json(text: str, place: str, role: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{place}: {role} is {_shown(text)}, which is not JSON") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
