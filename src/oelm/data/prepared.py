"""A prepared task: tokenised examples by split as a source of batches, and the one file that keeps them.

Owns batches and scores of classification, tagging and reading comprehension. The file is an .npz without pickle, written
whole or not at all; it needs neither the text nor the tokenizer. Refuses a file that is damaged, altered or another thing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from oelm.data import scores
from oelm.data.batches import Order, padded, padded_length, part
from oelm.data.disk import saving, sync_folder
from oelm.data.examples import IGNORED, Arrays, texts_of
from oelm.errors import DataError, nearest


Batch = dict[str, npt.NDArray[Any]]
Output = Sequence[Any]  # (index, predictions ...) of one batch

FORMAT = "oelm-task-1"
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    zipfile.BadZipFile,
    RecursionError,
    NotImplementedError,
    MemoryError,
)
_BEST = 20  # starts and ends that are looked at for an answer
_LONGEST_ANSWER = 30  # tokens


class Prepared:
    """Examples of one task as a source. `split` is train, validation or test.

    With selection = "test" (the original's protocol) the name validation reads the test split; the provenance says so.
    """

    def __init__(self, splits: Mapping[str, Arrays], meta: Mapping[str, Any], *, bucketing: bool = True) -> None:
        self.splits = dict(splits)
        self.meta = dict(meta)
        self.kind: str = meta["kind"]
        self.name: str = meta["name"]
        self.fingerprint: str = meta["fingerprint"]
        self.vocab_size: int = meta["vocab_size"]
        self.pad_id: int = meta["pad_id"]
        self.labels: tuple[str, ...] = tuple(meta["labels"])
        self.context: int = meta["context"]
        self.provenance: dict[str, Any] = dict(meta["provenance"])
        self.bucketing = bucketing
        self._orders = {
            name: Order(np.diff(arrays["offsets"]), bucketing=bucketing) for name, arrays in self.splits.items()
        }

    @property
    def train_size(self) -> int:
        """Training examples; for reading comprehension, windows of contexts."""
        return len(self._orders["train"].lengths)

    def size(self, split: str) -> int:
        """Examples (windows) of a split."""
        return len(self._orders[self._split(split)].lengths)

    def steps_per_epoch(self, batch: int) -> int:
        return self._orders["train"].steps(batch)

    def waste(self, batch: int) -> float:
        """The share of padding among the tokens of a training epoch."""
        return self._orders["train"].waste(batch, self.context)

    def train_batch(
        self, *, seed: int, step: int, batch: int, rank: int = 0, world: int = 1, pad_to: int | None = None
    ) -> Batch:
        """The rank's part of training batch `step`, a pure function of the arguments.

        All ranks have the width of the whole batch; `pad_to` fixes it for captured graphs.
        """
        rows = self._orders["train"].train(seed=seed, step=step, batch=batch)
        width = self._width("train", rows, pad_to)
        return self._batch("train", part(rows, rank, world), width)

    def eval_batches(self, split: str, batch: int, pad_to: int | None = None) -> Iterator[Batch]:
        """Every example of a split once in a fixed order; the last batch may be short."""
        split = self._split(split)
        for rows in self._orders[split].evaluation(batch):
            yield self._batch(split, rows, self._width(split, rows, pad_to))

    def score(self, split: str, outputs: Iterable[Output], *, per_example: bool = False) -> dict[str, Any]:
        """Scores of what a model said: outputs are (index, predictions) of batches, logits or label numbers.

        classify: accuracy, macro_f1. tag: f1, precision, recall, accuracy. qa: exact_match, f1 from start and end logits.
        `examples` says how many were scored; with per_example, {index: right} (tag: {index: tags right}, qa: {id: F1}).
        """
        split = self._split(split)
        found = {"classify": self._score_labels, "tag": self._score_tags, "qa": self._score_answers}
        return found[self.kind](split, list(outputs), per_example)

    def _split(self, split: str) -> str:
        if split == "validation" and self.meta["settings"]["selection"] == "test":
            split = "test"
        if split not in self.splits:
            raise DataError(f"{self.name} has no {split!r} split; {nearest(split, self.splits)}")
        return split

    def _width(self, split: str, rows: npt.NDArray[np.int64], pad_to: int | None) -> int:
        return padded_length(int(self._orders[split].lengths[rows].max()), self.context, pad_to)

    def _batch(self, split: str, rows: npt.NDArray[np.int64], width: int) -> Batch:
        arrays = self.splits[split]
        inputs, mask = padded(arrays["ids"], arrays["offsets"], rows, width, self.pad_id)
        if self.kind == "tag":
            labels, _ = padded(arrays["tags"], arrays["offsets"], rows, width, IGNORED)
            return {"inputs": inputs, "mask": mask, "types": np.zeros_like(inputs), "labels": labels, "index": rows}
        second = arrays["second"][rows].astype(np.int64)
        types = (mask & (np.arange(width)[None, :] >= second[:, None])).astype(np.int64)
        batch = {"inputs": inputs, "mask": mask, "types": types, "index": rows}
        names = ("start", "end") if self.kind == "qa" else ("labels",)
        batch |= {name: arrays[name][rows].astype(np.int64) for name in names}
        if self.kind == "classify":
            batch["last"] = mask.sum(axis=1) - 1
        return batch

    def _score_labels(self, split: str, outputs: list[Output], per_example: bool) -> dict[str, Any]:
        said: dict[int, int] = {}
        for index, *predictions in outputs:
            values = np.asarray(predictions[0])
            values = values.argmax(axis=-1) if values.ndim == 2 else values
            said.update(zip(self._rows(split, index, len(values)), values.tolist(), strict=True))
        rows = self._scored(split, said)
        truth = self.splits[split]["labels"][rows]
        given = np.asarray([said[row] for row in rows])
        result: dict[str, Any] = {
            "accuracy": scores.accuracy(truth, given),
            "macro_f1": scores.macro_f1(truth, given, len(self.labels)),
            "examples": len(rows),
        }
        if per_example:
            result["per_example"] = {
                row: int(right) for row, right in zip(rows, (truth == given).tolist(), strict=True)
            }
        return result

    def _score_tags(self, split: str, outputs: list[Output], per_example: bool) -> dict[str, Any]:
        arrays = self.splits[split]
        given: dict[int, list[str]] = {}
        truth: dict[int, list[str]] = {}
        for index, *predictions in outputs:
            values = np.asarray(predictions[0])
            values = values.argmax(axis=-1) if values.ndim == 3 else values
            for row, line in zip(self._rows(split, index, len(values)), values, strict=True):
                first = arrays["tags"][arrays["offsets"][row] : arrays["offsets"][row + 1]] != IGNORED
                if len(line) < len(first):
                    raise DataError(f"{self.name}: {len(line)} predicted tags for {len(first)} tokens of example {row}")
                truth[row] = self._tags(arrays["truth"][arrays["words"][row] : arrays["words"][row + 1]])
                read = self._tags(line[: len(first)][first])
                given[row] = read + ["O"] * (len(truth[row]) - len(read))
        rows = self._scored(split, given)
        result: dict[str, Any] = dict(scores.entity_scores([truth[row] for row in rows], [given[row] for row in rows]))
        result["examples"] = len(rows)
        if per_example:
            result["per_example"] = {row: int(truth[row] == given[row]) for row in rows}
        return result

    def _tags(self, numbers: npt.NDArray[Any]) -> list[str]:
        return [self.labels[number] for number in numbers.tolist()]

    def _score_answers(self, split: str, outputs: list[Output], per_example: bool) -> dict[str, Any]:
        arrays = self.splits[split]
        best: dict[int, tuple[float, int, int]] = {}
        seen: set[int] = set()
        for index, *predictions in outputs:
            starts, ends = predictions if len(predictions) == 2 else predictions[0]
            starts, ends = np.asarray(starts, dtype=np.float64), np.asarray(ends, dtype=np.float64)
            for place, row in enumerate(self._rows(split, index, len(starts))):
                seen.add(row)
                question = int(arrays["question"][row])
                found = self._best_span(arrays, row, starts[place], ends[place])
                if found is not None and (question not in best or found[0] > best[question][0]):
                    best[question] = found
        self._scored(split, seen)
        asked = sorted({int(arrays["question"][row]) for row in seen})
        keys = dict(zip(asked, texts_of(arrays, "keys", asked), strict=True))
        said: dict[str, str] = {}
        truth: dict[str, Sequence[str]] = {}
        for question in asked:
            bounds = arrays["answers_of"][question : question + 2]
            truth[keys[question]] = texts_of(arrays, "answers", range(int(bounds[0]), int(bounds[1])))
            if question in best:
                (context,) = texts_of(arrays, "contexts", [int(arrays["context_of"][question])])
                said[keys[question]] = context[best[question][1] : best[question][2]].strip()
        result, each = scores.answer_scores(truth, said)
        found_scores: dict[str, Any] = {**result, "examples": len(asked)}
        if per_example:
            found_scores["per_example"] = {key: pair[1] for key, pair in each.items()}
            found_scores["answers"] = said
        return found_scores

    @staticmethod
    def _best_span(
        arrays: Arrays, row: int, start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]
    ) -> tuple[float, int, int] | None:
        """The best-scored span of one window inside its context: its score, and its characters."""
        low, high = int(arrays["offsets"][row]), int(arrays["offsets"][row + 1])
        begins, stops = arrays["from"][low:high], arrays["to"][low:high]
        allowed = np.nonzero(begins >= 0)[0]
        if not len(allowed) or len(start) < high - low:
            return None
        starts = allowed[np.argsort(-start[allowed], kind="stable")[:_BEST]]
        ends = allowed[np.argsort(-end[allowed], kind="stable")[:_BEST]]
        pairs = start[starts][:, None] + end[ends][None, :]
        length = ends[None, :] - starts[:, None]
        pairs = np.where((length >= 0) & (length < _LONGEST_ANSWER), pairs, -np.inf)
        first, last = np.unravel_index(int(pairs.argmax()), pairs.shape)
        score = float(pairs[first, last])
        if not np.isfinite(score):
            return None
        return score, int(begins[starts[first]]), int(stops[ends[last]])

    def _rows(self, split: str, index: Any, predictions: int) -> list[int]:
        rows: list[int] = np.asarray(index, dtype=np.int64).tolist()
        if len(rows) != predictions:
            raise DataError(f"{self.name}: {predictions} predictions for {len(rows)} examples of {split}")
        wrong = [row for row in rows if not 0 <= row < self.size(split)]
        if wrong:
            raise DataError(f"{self.name}: example {wrong[0]} is not in {split}, which has {self.size(split)}")
        return rows

    def _scored(self, split: str, said: Iterable[int]) -> list[int]:
        rows = sorted(said)
        if not rows:
            raise DataError(f"{self.name}: no prediction to score for {split}")
        return rows


def save(source: Prepared, path: Path, *, compressed: bool = False) -> Path:
    """The one file of a prepared task, whole or not at all."""
    arrays = {f"{split}/{name}": array for split, found in source.splits.items() for name, array in found.items()}
    meta = source.meta | {"format": FORMAT, "sha256": {name: _array_digest(array) for name, array in arrays.items()}}
    text = np.frombuffer(json.dumps(meta, ensure_ascii=False, allow_nan=False).encode(), dtype=np.uint8)
    write = np.savez_compressed if compressed else np.savez
    beside = path.with_name(path.name + ".new")
    with saving(path.parent, "-o" if compressed else "OELM_HOME"):
        try:
            with beside.open("wb") as stream:
                write(stream, allow_pickle=False, meta=text, **arrays)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    return path


def load(path: Path, *, bucketing: bool = True) -> Prepared:
    """A prepared task from its file; a DataError when it is damaged, altered or another thing."""
    try:
        with path.open("rb") as stream, contextlib.closing(_archive(stream)) as archive:
            if "meta" not in archive.files:
                raise DataError(f"{path}: is not a prepared task of OELM; prepare it again")
            meta = json.loads(np.asarray(archive["meta"]).tobytes())
            arrays = {name: np.asarray(archive[name]) for name in archive.files if name != "meta"}
    except FileNotFoundError:
        raise DataError(f"{path}: no such prepared task; check the name") from None
    except _UNREADABLE as error:
        said = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        raise DataError(f"{path}: is damaged or no prepared task ({said}); delete it and prepare it again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataError(f"{path}: is not a prepared task of this version; prepare it again")
    sums = meta.get("sha256")
    for name, array in arrays.items():
        if not isinstance(sums, dict) or sums.get(name) != _array_digest(array):
            raise DataError(f"{path}: {name} is not what was written; delete the file and prepare it again")
    if set(sums or ()) != set(arrays):
        raise DataError(f"{path}: lacks arrays that were written; delete the file and prepare it again")
    splits: dict[str, Arrays] = defaultdict(dict)
    for name, array in arrays.items():
        split, _, key = name.partition("/")
        splits[split][key] = array
    try:
        for split, found in splits.items():
            _check(found, meta, split)
        return Prepared(splits, meta, bucketing=bucketing)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: is not whole ({error}); delete the file and prepare it again") from None


def _archive(stream: IO[bytes]) -> Any:
    """The arrays of a file; never anything that is unpickled."""
    found = np.load(stream, allow_pickle=False)
    if not isinstance(found, np.lib.npyio.NpzFile):
        raise ValueError("one array, not an archive")
    return found


def _check(arrays: Arrays, meta: Mapping[str, Any], split: str) -> None:
    """A ValueError for arrays that do not fit each other, their vocabulary or their labels."""
    kind, count = meta["kind"], len(arrays["offsets"]) - 1
    single = {"classify": ("second", "labels"), "tag": (), "qa": ("second", "start", "end", "question")}[kind]
    flat = {"classify": (), "tag": ("tags",), "qa": () if split == "train" else ("from", "to")}[kind]
    steps = np.diff(arrays["offsets"])
    if count < 1 or (steps < 1).any() or arrays["offsets"][0] != 0 or arrays["offsets"][-1] != len(arrays["ids"]):
        raise ValueError(f"{split}: its rows do not add up")
    if any(len(arrays[name]) != count for name in single) or any(len(arrays[n]) != len(arrays["ids"]) for n in flat):
        raise ValueError(f"{split}: its arrays differ in length")
    if int(arrays["ids"].max()) >= meta["vocab_size"] or int(steps.max()) > meta["context"]:
        raise ValueError(f"{split}: tokens beyond the vocabulary or the context")
    for name in {"classify": ("labels",), "tag": ("tags", "truth"), "qa": ()}[kind]:
        numbers = arrays[name][arrays[name] != IGNORED]
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(meta["labels"]):
            raise ValueError(f"{split}: labels beyond {len(meta['labels'])}")


def _array_digest(array: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
