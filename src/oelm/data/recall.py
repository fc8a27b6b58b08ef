"""Associative recall, made from a seed: pairs of a key and a value, then the keys again, each with its value to be said.

Owns the making of sequences and their score by number of pairs and by distance. Perplexity hides what attention without
matching cannot do; this task measures nothing else. Refuses pairs that do not fit into the context or the symbols.

A sequence is a row of (key, value) pairs, then slots of two tokens: every key is asked once, in random order and at a
random slot, and its value follows it; the slots between hold noise, which are value symbols and never keys. The target
at an asked key is its value; nothing else is a target. The number of pairs of a sequence is drawn from `ladder`.
Tokens: 0 pads, 1 .. symbols/2 are keys, the rest are values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.data.batches import Order, part
from oelm.data.spec import DataSpec
from oelm.errors import ConfigError, DataError
from oelm.values import digest


Batch = dict[str, npt.NDArray[Any]]

TRAIN_EXAMPLES = 65_536
HELD_OUT_EXAMPLES = 2_048
_BLOCK = 512  # sequences that are made together
_SPLITS = {"train": 1, "validation": 2, "test": 3}
_IGNORED = -100
_RULE = 1  # raise when sequences of one seed change


def ladder(pairs: int) -> tuple[int, ...]:
    """The numbers of pairs a sequence may have: all, a half, a quarter."""
    return tuple(sorted({max(1, pairs // 4), max(1, pairs // 2), pairs}))


class RecallSource:
    """The recall task as a source of batches: inputs, targets, pairs (B,), distance (B, T), index (B,)."""

    kind = "recall"
    name = "recall"
    pad_id = 0
    labels: tuple[str, ...] = ()

    def __init__(self, spec: DataSpec) -> None:
        self.keys = spec.symbols // 2
        if spec.pairs > self.keys:
            raise ConfigError(
                f"data.pairs = {spec.pairs} needs as many different keys, and symbols = {spec.symbols} has {self.keys}; "
                f"use symbols of at least {2 * spec.pairs}"
            )
        if 4 * spec.pairs > spec.context:
            raise ConfigError(
                f"data.pairs = {spec.pairs} needs {4 * spec.pairs} tokens (pair and question) and context is "
                f"{spec.context}; use at most {spec.context // 4} pairs"
            )
        self.spec = spec
        self.vocab_size = spec.symbols + 1
        self.context = spec.context
        self.train_size = spec.examples or TRAIN_EXAMPLES
        self.fingerprint = digest(
            {
                "task": "recall",
                "rule": _RULE,
                "pairs": spec.pairs,
                "symbols": spec.symbols,
                "context": spec.context,
                "seed": spec.seed,
                "examples": self.train_size,
                "selection": spec.selection,
            },
            length=64,
        )
        self._order = Order(np.full(self.train_size, spec.context), bucketing=False)
        self._held_out = Order(np.full(HELD_OUT_EXAMPLES, spec.context), bucketing=False)
        self._made: dict[str, _Made] = {}

    @property
    def provenance(self) -> dict[str, Any]:
        """What the run records about its data."""
        return {
            "name": self.name,
            "status": "synthetic",
            "where": "made from the seed",
            "licence": "none needed",
            "counts": {"train": self.train_size, "validation": HELD_OUT_EXAMPLES, "test": HELD_OUT_EXAMPLES},
            "tokenizer": "none",
            "truncated": 0,
            "selection": self.spec.selection,
            "note": f"pairs {list(ladder(self.spec.pairs))}, {self.spec.symbols} symbols, seed {self.spec.seed}",
        }

    def steps_per_epoch(self, batch: int) -> int:
        return self._order.steps(batch)

    def waste(self, batch: int) -> float:
        """The share of padding: none, every sequence fills the context."""
        self._order.steps(batch)
        return 0.0

    def train_batch(
        self, *, seed: int, step: int, batch: int, rank: int = 0, world: int = 1, pad_to: int | None = None
    ) -> Batch:
        """The rank's part of training batch `step`; every sequence has the same width, so `pad_to` changes nothing."""
        return self._batch("train", part(self._order.train(seed=seed, step=step, batch=batch), rank, world))

    def eval_batches(self, split: str, batch: int, pad_to: int | None = None) -> Iterator[Batch]:
        """Every sequence of a held-out split once, in a fixed order; the last batch may be short."""
        split = self._split(split)
        order = self._order if split == "train" else self._held_out
        for rows in order.evaluation(batch):
            yield self._batch(split, rows)

    def score(self, split: str, outputs: Sequence[Sequence[Any]], *, per_example: bool = False) -> dict[str, Any]:
        """Accuracy over all questions, and by number of pairs and by distance.

        outputs: (index, predictions), predictions (B, T) symbols or (B, T, vocabulary) logits; entry t is what the model
        says comes after token t. Distances are binned by powers of two: "64" holds 64 to 127 tokens.
        """
        split = self._split(split)
        rows: list[npt.NDArray[Any]] = []
        right: list[npt.NDArray[Any]] = []
        pairs: list[npt.NDArray[Any]] = []
        distance: list[npt.NDArray[Any]] = []
        whole: dict[int, float] = {}
        for index, predictions in outputs:
            said = np.asarray(predictions)
            said = said.argmax(-1) if said.ndim == 3 else said
            index = np.asarray(index, dtype=np.int64)
            truth = self._batch(split, index)
            if said.shape != truth["targets"].shape:
                raise DataError(f"recall: predictions of shape {said.shape} for targets of {truth['targets'].shape}")
            asked = truth["targets"] != _IGNORED
            hit = (said == truth["targets"]) & asked
            rows.append(index)
            right.append(hit[asked])
            pairs.append(np.repeat(truth["pairs"], asked.sum(axis=1)))
            distance.append(truth["distance"][asked])
            whole.update(zip(index.tolist(), (hit.sum(axis=1) / asked.sum(axis=1)).tolist(), strict=True))
        if not rows:
            raise DataError(f"recall: no prediction to score for split {split!r}")
        hits, counts, gaps = np.concatenate(right), np.concatenate(pairs), np.concatenate(distance)
        bins = 2 ** np.floor(np.log2(gaps)).astype(np.int64)
        result: dict[str, Any] = {
            "accuracy": float(hits.mean()),
            "by_pairs": {str(n): float(hits[counts == n].mean()) for n in np.unique(counts)},
            "by_distance": {str(n): float(hits[bins == n].mean()) for n in np.unique(bins)},
            "examples": len(whole),
            "questions": len(hits),
        }
        if per_example:
            result["per_example"] = {str(row): value for row, value in sorted(whole.items())}
        return result

    def _split(self, split: str) -> str:
        if split not in _SPLITS:
            raise DataError(f"recall has no split {split!r}; known: train, validation, test")
        return "test" if split == "validation" and self.spec.selection == "test" else split

    def _batch(self, split: str, rows: npt.NDArray[np.int64]) -> Batch:
        size = self.train_size if split == "train" else HELD_OUT_EXAMPLES
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < size:
            raise DataError(f"recall: example {int(rows.max())} is not in {split}, which has {size}")
        made = self._with(split, rows, size)
        inputs, distance = made.tokens[rows].astype(np.int64), made.distance[rows].astype(np.int64)
        targets = np.full_like(inputs, _IGNORED)
        np.copyto(targets[:, :-1], inputs[:, 1:], where=distance[:, :-1] > 0)
        return {"inputs": inputs, "targets": targets, "pairs": made.pairs[rows], "distance": distance, "index": rows}

    def _with(self, split: str, rows: npt.NDArray[np.int64], size: int) -> _Made:
        """The sequences of a split, these rows at least: made a block at a time when first asked for, and kept."""
        if split not in self._made:
            self._made[split] = _Made(size, self.context, self.vocab_size)
        made = self._made[split]
        blocks = rows // _BLOCK
        for block in np.unique(blocks[~made.known[blocks]]).tolist():
            place = slice(block * _BLOCK, min(size, (block + 1) * _BLOCK))
            columns = self._make(_SPLITS[split], block)
            for kept, whole in zip((made.tokens, made.distance, made.pairs), columns, strict=True):
                kept[place] = whole[: place.stop - place.start]
            made.known[block] = True
        return made

    def _make(
        self, split: int, block: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The sequences of a block, how many tokens back the key of each question stands (else 0), and their pairs."""
        # Raw bits of Philox only: they are fixed by its definition, whatever the version of numpy.
        bits = np.random.Philox(np.random.SeedSequence([self.spec.seed, split, block]))

        def draw(columns: int) -> npt.NDArray[np.uint64]:
            return np.asarray(bits.random_raw(_BLOCK * columns)).reshape(_BLOCK, columns)

        most, values = self.spec.pairs, self.spec.symbols - self.keys
        steps = np.asarray(ladder(most), dtype=np.int64)
        pairs = steps[(draw(1)[:, 0] % len(steps)).astype(np.int64)]
        keys = np.argsort(draw(self.keys), axis=1, kind="stable")[:, :most] + 1
        answers = (draw(most) % values).astype(np.int64) + self.keys + 1
        tokens = (draw(self.context) % values).astype(np.int64) + self.keys + 1
        slots = draw(self.context // 2)
        order = draw(most)
        distance = np.zeros_like(tokens)
        for count in steps.tolist():
            (rows,) = np.nonzero(pairs == count)
            tokens[rows, 0 : 2 * count : 2] = keys[rows, :count]
            tokens[rows, 1 : 2 * count : 2] = answers[rows, :count]
            free = np.sort(np.argsort(slots[rows, count:], axis=1, kind="stable")[:, :count], axis=1) + count
            asked = np.argsort(order[rows, :count], axis=1, kind="stable")
            row = rows[:, None]
            tokens[row, 2 * free] = keys[row, asked]
            tokens[row, 2 * free + 1] = answers[row, asked]
            distance[row, 2 * free] = 2 * (free - asked)
        return tokens, distance, pairs


class _Made:
    """Sequences of a split as far as they have been asked for."""

    def __init__(self, size: int, context: int, vocabulary: int) -> None:
        self.known = np.zeros(-(-size // _BLOCK), dtype=np.bool_)
        self.tokens = np.zeros((size, context), dtype=np.uint16 if vocabulary <= 2**16 else np.uint32)
        self.distance = np.zeros((size, context), dtype=np.uint16 if context <= 2**16 else np.uint32)
        self.pairs = np.zeros(size, dtype=np.int64)
