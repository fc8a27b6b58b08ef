"""Rows of a task's data set, split honestly.

Owns which row goes to which split. Selection reads validation; where a set has none it is carved from train by hash, and
near-equal texts (of a pair its first text, of a question its article) stay on one side. The test split stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from oelm.data import overlap, sources
from oelm.data.batches import shuffled
from oelm.data.sources import SPLITS, FilesFound, Found
from oelm.data.spec import DataSpec
from oelm.data.tables import Labels, Row, label_names, labelled, questions, tag_names, tagged
from oelm.data.task_table import ELSEWHERE, HUB_ORDER, UNLABELLED
from oelm.errors import DataError


_LOCAL_CARVE = {"validation": 0.1, "test": 0.1}
_ENOUGH = 1000  # examples that a carved split should have, where a tenth of train gives them
_LIMIT = 0x6C69  # the stream of the seed that chooses `examples` of them


@dataclass
class Rows:
    """The examples of one split before they are tokens: each with its key (near-equal keys stay together) and text."""

    items: list[Any]  # (text, second, label) | (words, tags) | Question
    keys: list[str]
    texts: list[str]
    left_out: int = 0

    def chosen(self, numbers: Iterable[int]) -> Rows:
        wanted = list(numbers)
        items, keys, texts = ([values[n] for n in wanted] for values in (self.items, self.keys, self.texts))
        return Rows(items, keys, texts)


def honest_splits(spec: DataSpec, kind: str, found: Found) -> tuple[tuple[str, ...], dict[str, Rows], dict[str, int]]:
    """Label names, the examples of every split, and how many rows the files of each split have."""
    labels, rows, counts = _read(spec, kind, found)
    return labels, _limited(spec, _carved(spec, found, rows)), counts


def _read(spec: DataSpec, kind: str, found: Found) -> tuple[tuple[str, ...], dict[str, Rows], dict[str, int]]:
    """Labels, the rows of every split there is, and how many rows its files have."""
    places: dict[str, Found] = dict.fromkeys(found.splits, found)
    other = ELSEWHERE.get(spec.name)
    if other is not None and "test" not in places and (more := sources.find_hub(other)) is not None:
        places["test"] = more
    if "train" not in places:
        raise DataError(f"{spec.name}: has no training rows; expected {found.dataset.expected()}")
    labels = _labels(spec, kind, found)
    rows: dict[str, Rows] = {}
    counts: dict[str, int] = {}
    for split in SPLITS:
        if split in places and not (split == "validation" and spec.selection == "test"):
            counter = _Counter(places[split].rows(split))
            rows[split] = _parsed(kind, counter, labels, _where(places[split], split), split)
            counts[split] = counter.count
    if spec.selection == "test" and "test" not in rows and spec.name != "local":
        raise DataError(f'{spec.name}: selection = "test" needs a test split, and {found.place} has none')
    return labels.names, rows, counts


class _Counter:
    """Rows as they come, counted."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            self.count += 1
            yield row


def _labels(spec: DataSpec, kind: str, found: Found) -> Labels:
    if kind == "qa":
        return Labels(())
    where = _where(found, "train")
    if spec.name == "local":
        read = label_names if kind == "classify" else tag_names
        return Labels(read(found.rows("train"), where), own=True)
    known = isinstance(found, FilesFound) and found.layout in found.dataset.layouts
    return Labels(
        found.dataset.labels,
        order=None if known else HUB_ORDER.get(spec.name),
        unlabelled=UNLABELLED.get(spec.name),
    )


def _parsed(kind: str, rows: Iterable[Row], labels: Labels, where: str, split: str) -> Rows:
    if kind == "classify":
        read = labelled(rows, labels, where)
        seconds: list[str] | list[None] = read.seconds if read.seconds is not None else [None] * len(read.texts)
        joined = [
            text if second is None else f"{text}\n{second}" for text, second in zip(read.texts, seconds, strict=True)
        ]
        return Rows(list(zip(read.texts, seconds, read.labels, strict=True)), read.texts, joined, read.unlabelled)
    if kind == "tag":
        sentences = tagged(rows, labels.names, where)
        joined = [" ".join(words) for words in sentences.words]
        return Rows(list(zip(sentences.words, sentences.tags, strict=True)), joined, joined)
    found = questions(rows, where)
    kept = [question for question in found if not (split == "train" and question.ambiguous)]
    texts = [f"{question.context}\n{question.question}" for question in kept]
    return Rows(list(kept), [question.group for question in kept], texts, len(found) - len(kept))


def _carved(spec: DataSpec, found: Found, rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """The splits, with those that are missing carved from train."""
    shares = _LOCAL_CARVE if spec.name == "local" else found.dataset.carve
    train = rows["train"]
    small = min(0.1, _ENOUGH / max(1, len(train.items)))
    wanted = {split: max(share, small) for split, share in shares.items() if split not in rows}
    if spec.selection == "test":
        wanted.pop("validation", None)
    if not wanted:
        return dict(rows)
    sides = overlap.carve(train.keys, wanted, spec.seed, where=_where(found, "train"))
    split_up = dict(rows)
    for split in ("train", *wanted):
        split_up[split] = train.chosen(number for number, side in enumerate(sides) if side == split)
        if not split_up[split].items:
            raise DataError(f"{_where(found, 'train')}: nothing is left for {split}; give more rows")
    split_up["train"].left_out = train.left_out
    return {split: split_up[split] for split in SPLITS if split in split_up}


def _limited(spec: DataSpec, rows: dict[str, Rows]) -> dict[str, Rows]:
    """`examples` of the training rows, chosen by the seed: files are often sorted by label."""
    train = rows["train"]
    if spec.examples is None or spec.examples >= len(train.items):
        return rows
    few = train.chosen(np.sort(shuffled(len(train.items), spec.seed, _LIMIT)[: spec.examples]).tolist())
    few.left_out = train.left_out
    return rows | {"train": few}


def _where(found: Found, split: str) -> str:
    """The file of a split for messages, or the set and the split where there are several."""
    if isinstance(found, FilesFound) and len(found.files.get(split, ())) == 1:
        return str(found.files[split][0])
    return f"{found.dataset.name} ({split})"
