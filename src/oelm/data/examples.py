"""Examples of a task as arrays of tokens: what of a text the model reads, and where its labels stand.

Owns the layout of an example, truncation and windows. Refuses a context with no room for one.

With a tokenizer that has [CLS] and [SEP] (BERT):  [CLS] a [SEP]  and  [CLS] a [SEP] b [SEP], types 0 and 1.
With <s> and </s> (RoBERTa): the same, all types 0, for such models know no others.
With only an end-of-text token (GPT BPE, bytes):  a  and  a <end> b, all types 0: the end token parts the two.
Pairs are cut longest first. A question reads  [CLS] question [SEP] context [SEP]  (or  question <end> context), its
context in overlapping windows. A word's first piece carries its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.data.tables import Labelled, Question, Tagged
from oelm.data.tokens import Tokens
from oelm.errors import ConfigError


Arrays = dict[str, npt.NDArray[Any]]
Progress = Callable[[int, int], None]  # examples done, examples in all

IGNORED = -100
NO_SECOND = 2**31 - 1  # where type 1 begins in an example that has none
QUESTION_TOKENS = 64  # a longer question is cut
OVERLAP = 128  # tokens that two windows of one context share
_TOGETHER = 2048  # texts that are tokenised together
_ROOM = 16  # the least tokens of a text beside the special ones


def classify_arrays(examples: Labelled, tokens: Tokens, context: int, progress: Progress | None = None) -> Arrays:
    """ids, offsets (ragged rows of ids), second (where type 1 begins), labels, cut (tokens left out)."""
    frame = Frame(tokens, context, parts=1 if examples.seconds is None else 2)
    rows: list[list[int]] = []
    seconds, cuts = [], []
    total = len(examples.texts)
    for start in range(0, total, _TOGETHER):
        firsts = tokens.encode_batch(examples.texts[start : start + _TOGETHER])
        others: Sequence[list[int] | None] = [None] * len(firsts)
        if examples.seconds is not None:
            others = tokens.encode_batch(examples.seconds[start : start + _TOGETHER])
        for first, other in zip(firsts, others, strict=True):
            row, second, cut = frame.joined(first, other)
            rows.append(row)
            seconds.append(second)
            cuts.append(cut)
        _tell(progress, len(rows), total)
    return _ragged(rows, tokens) | {
        "second": np.asarray(seconds, dtype=np.int32),
        "labels": np.asarray(examples.labels, dtype=np.int32),
        "cut": np.asarray(cuts, dtype=np.int32),
    }


def tag_arrays(
    examples: Tagged, names: Sequence[str], tokens: Tokens, context: int, progress: Progress | None = None
) -> Arrays:
    """ids, offsets, tags (one an id, IGNORED but at a word's first piece), truth and words (all tags, ragged), cut (words).

    Words after the last that fits are not read; the score counts them as tagged O.
    """
    frame = Frame(tokens, context, parts=1)
    number = {name: place for place, name in enumerate(names)}
    rows: list[list[int]] = []
    tags: list[int] = []
    cuts = []
    # GPT's pieces know whether a space comes before: a word inside a sentence is tokenised with its space.
    joint = "" if frame.framed else " "
    for done, (words, given) in enumerate(zip(examples.words, examples.tags, strict=True), start=1):
        pieces = tokens.encode_batch([joint * (place > 0) + word for place, word in enumerate(words)])
        row: list[int] = list(frame.before)
        marks = [IGNORED] * len(row)
        room = context - len(frame.after)
        kept = 0
        for piece, tag in zip(pieces, given, strict=True):
            piece = piece or [frame.unknown]  # a word of control characters only still is a word
            if len(row) + len(piece) > room:
                break
            row += piece
            marks += [number[tag]] + [IGNORED] * (len(piece) - 1)
            kept += 1
        whole = row + frame.after or [frame.separator]
        rows.append(whole)
        tags += marks + [IGNORED] * (len(whole) - len(marks))
        cuts.append(len(words) - kept)
        if done % _TOGETHER == 0 or done == len(examples.words):
            _tell(progress, done, len(examples.words))
    return _ragged(rows, tokens) | {
        "tags": np.asarray(tags, dtype=np.int16),
        "truth": np.asarray([number[tag] for given in examples.tags for tag in given], dtype=np.int16),
        "words": _offsets([len(given) for given in examples.tags]),
        "cut": np.asarray(cuts, dtype=np.int32),
    }


def qa_arrays(
    examples: Sequence[Question], tokens: Tokens, context: int, *, train: bool, progress: Progress | None = None
) -> Arrays:
    """ids, offsets, second, start, end (tokens of the answer in the window, or IGNORED), question (which it belongs to).

    To train, windows without the answer are left out. Otherwise all are kept, with what the answer's text is read back
    from: from and to (characters of the context a token covers, -1 outside it), and the contexts and answers themselves.
    """
    frame = Frame(tokens, context, parts=2, longest_first_part=QUESTION_TOKENS)
    places: dict[str, int] = {}
    for example in examples:
        places.setdefault(example.context, len(places))
    contexts = list(places)
    encoded = list(_with_offsets(contexts, tokens))
    asked = [tokens.encode(example.question) for example in examples]
    rows: list[list[int]] = []
    columns: dict[str, list[int]] = {name: [] for name in ("second", "start", "end", "question")}
    spans: list[npt.NDArray[np.int32]] = []
    cuts = []
    for number, example in enumerate(examples):
        ids, offsets = encoded[places[example.context]]
        question = asked[number][:QUESTION_TOKENS]
        cuts.append(len(asked[number]) - len(question))
        answer = _answer_tokens(example, offsets)
        head = [*frame.before, *question, frame.separator]
        room = context - len(head) - len(frame.after)
        for begin in _window_starts(len(ids), room):
            window = ids[begin : begin + room]
            inside = begin <= answer[0] and answer[1] < begin + len(window)
            if train and not inside:
                continue
            rows.append([*head, *window, *frame.after])
            shift = len(head) - begin
            columns["second"].append(len(head) if frame.typed else NO_SECOND)
            columns["start"].append(answer[0] + shift if inside else IGNORED)
            columns["end"].append(answer[1] + shift if inside else IGNORED)
            columns["question"].append(number)
            if not train:
                span = np.full((len(rows[-1]), 2), -1, dtype=np.int32)
                span[len(head) : len(head) + len(window)] = offsets[begin : begin + room]
                spans.append(span)
        if (number + 1) % _TOGETHER == 0 or number + 1 == len(examples):
            _tell(progress, number + 1, len(examples))
    arrays = _ragged(rows, tokens) | {name: np.asarray(values, dtype=np.int32) for name, values in columns.items()}
    arrays["cut"] = np.asarray(cuts, dtype=np.int32)
    if not train:
        both = np.concatenate(spans) if spans else np.empty((0, 2), dtype=np.int32)
        arrays |= {"from": both[:, 0].copy(), "to": both[:, 1].copy()}
        arrays |= _texts("contexts", contexts)
        arrays["context_of"] = np.asarray([places[example.context] for example in examples], dtype=np.int32)
        arrays |= _texts("answers", [answer for example in examples for answer in example.answers])
        arrays["answers_of"] = _offsets([len(example.answers) for example in examples])
        arrays |= _texts("keys", [example.key for example in examples])
    return arrays


def texts_of(arrays: Arrays, name: str, numbers: Sequence[int] | range) -> list[str]:
    """Texts that `qa_arrays` laid down as bytes."""
    flat, offsets = arrays[f"{name}_bytes"], arrays[f"{name}_offsets"]
    return [flat[offsets[number] : offsets[number + 1]].tobytes().decode() for number in numbers]


class Frame:
    """The special tokens around the parts of an example, and the room they leave."""

    def __init__(self, tokens: Tokens, context: int, *, parts: int, longest_first_part: int = 0) -> None:
        cls, sep = tokens.cls_id, tokens.sep_id
        self.framed = cls is not None and sep is not None
        self.typed = self.framed and tokens.backend.id_to_token(sep) == "[SEP]"
        self.before: list[int] = [cls] if cls is not None and sep is not None else []
        self.after: list[int] = [sep] if cls is not None and sep is not None else []
        self.separator: int = sep if cls is not None and sep is not None else tokens.eos_id
        self.unknown: int = tokens.eos_id if tokens.unk_id is None else tokens.unk_id
        special = len(self.before) + len(self.after) + (parts - 1)
        self.room = context - special
        least = special + longest_first_part + (_ROOM if longest_first_part else parts)
        if context < least:
            raise ConfigError(f"data.context = {context} is too short for this task: use at least {least} tokens")

    def joined(self, first: list[int], second: list[int] | None) -> tuple[list[int], int, int]:
        """One example: its ids, where type 1 begins, and how many tokens were left out."""
        if second is None:
            kept = first[: self.room]
            row = [*self.before, *kept, *self.after]
            return row or [self.separator], NO_SECOND, len(first) - len(kept)
        keep_first, keep_second = longest_first(len(first), len(second), self.room)
        head = [*self.before, *first[:keep_first], self.separator]
        row = [*head, *second[:keep_second], *self.after]
        cut = len(first) - keep_first + len(second) - keep_second
        return row, len(head) if self.typed else NO_SECOND, cut


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two parts is kept when the longer is cut first; of two cut parts the longer keeps the odd token."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if shorter > room // 2:
        halves = (room // 2, room - room // 2)
        return halves if first <= second else halves[::-1]
    return (first, room - first) if first <= second else (room - second, second)


def _window_starts(length: int, room: int) -> Iterator[int]:
    """Where windows of `room` tokens begin so that all of `length` tokens are read, with an overlap."""
    step = room - min(OVERLAP, room // 2)
    start = 0
    while True:
        yield start
        if start + room >= length:
            return
        start += step


def _with_offsets(texts: Sequence[str], tokens: Tokens) -> Iterator[tuple[list[int], npt.NDArray[np.int32]]]:
    for start in range(0, len(texts), _TOGETHER):
        for item in tokens.backend.encode_batch(list(texts[start : start + _TOGETHER]), add_special_tokens=False):
            yield list(item.ids), np.asarray(item.offsets, dtype=np.int32).reshape(-1, 2)


def _answer_tokens(example: Question, offsets: npt.NDArray[np.int32]) -> tuple[int, int]:
    """The first and the last token of the first reference answer; (-1, -1) when no token covers it."""
    begin = example.starts[0]
    covering = np.nonzero((offsets[:, 1] > begin) & (offsets[:, 0] < begin + len(example.answers[0])))[0]
    return (int(covering[0]), int(covering[-1])) if len(covering) else (-1, -1)


def _ragged(rows: Sequence[Sequence[int]], tokens: Tokens) -> Arrays:
    offsets = _offsets([len(row) for row in rows])
    kind = np.uint16 if tokens.vocab_size <= 2**16 else np.uint32
    flat = np.empty(int(offsets[-1]), dtype=kind)
    for row, start in zip(rows, offsets[:-1].tolist(), strict=True):
        flat[start : start + len(row)] = row
    return {"ids": flat, "offsets": offsets}


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _texts(name: str, texts: Sequence[str]) -> Arrays:
    encoded = [text.encode() for text in texts]
    return {
        f"{name}_bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        f"{name}_offsets": _offsets([len(text) for text in encoded]),
    }


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
