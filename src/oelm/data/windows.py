"""Batches of a language model: non-overlapping windows of a token store, shuffled each epoch.

A window of T inputs has the T tokens after them as targets, so a split of N tokens scores N-1 of them, each once.
Training batches are a pure function of (seed, step, rank, world); evaluation reads every window once, in order, and
can slide by a stride. Refuses a split that is shorter than one window.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import numpy as np

from oelm.data import corpora, perplexity
from oelm.data.batches import part, shuffled
from oelm.data.spec import DataSpec
from oelm.data.store import Ids, Store, Stream
from oelm.errors import ConfigError, DataError, nearest


Batch = dict[str, Any]
IGNORED = -100
_ORDER = 0x6C6D  # the stream of a seed that orders windows


class LmSource:
    """A token store read as windows."""

    kind: Literal["lm"] = "lm"
    labels: tuple[str, ...] = ()

    def __init__(self, spec: DataSpec, store: Store) -> None:
        self.spec = spec
        self.store = store
        self.name = spec.name
        self.context = spec.context
        self.vocab_size = store.index.tokenizer.vocab_size
        self.pad_id = store.index.tokenizer.pad_id
        self._streams: dict[str, Stream] = {}
        self._epoch: tuple[tuple[int, int, int], Ids] | None = None  # a memory, not a state
        tokens = len(self.stream("train"))
        if tokens < spec.context + 1:
            raise DataError(
                f"{self.name}: {tokens:,} training tokens are fewer than one window of {spec.context:,} and its next "
                f"token; lower context or give more text"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Of the ids, the boundaries and the tokenizer."""
        return self.store.fingerprint(self.spec.tokens)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Where the text came from and what of it is read."""
        index = self.store.index
        said = dict(index.provenance)
        notes = [str(said.get("note", ""))]
        train = len(self.stream("train"))
        if self.spec.tokens is None and not index.whole:
            said["status"] = "partial" if said.get("status") == "real" else said.get("status")
            notes.append(f"this store holds the first {train:,} training tokens only")
        elif self.spec.tokens is not None:
            notes.append(f"the first {train:,} training tokens are read, as asked")
        if self.spec.selection == "test":
            notes.append(
                'selection = "test": validation reads the test split, the original\'s protocol, for replication only'
            )
        return said | {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "splits": {
                split: {"tokens": len(stream), "documents": len(stream.starts)}
                for split, stream in ((split, self.store.stream(split, self.spec.tokens)) for split in index.splits)
            },
            "tokenizer": {
                "name": index.tokenizer.name,
                "hash": index.tokenizer.hash,
                "vocabulary": index.tokenizer.vocab_size,
            },
            "perplexity": {
                "context": self.context,
                "stride": self.context,
                "word_count": corpora.words_of(self.name),
            },
            "selection": self.spec.selection,
            "note": "; ".join(note for note in notes if note),
        }

    def stream(self, split: str) -> Stream:
        """The ids of a split."""
        split = self._read_split(split)
        if split not in self._streams:
            self._streams[split] = self.store.stream(split, self.spec.tokens)
        return self._streams[split]

    def _read_split(self, split: str) -> str:
        """The original's protocol selects on the test split; only who asks for it by name gets it."""
        if split not in self.store.index.splits:
            raise DataError(f"{self.name}: has no split {split!r}; {nearest(split, self.store.index.splits)}")
        return "test" if split == "validation" and self.spec.selection == "test" else split

    @property
    def train_size(self) -> int:
        """Windows of one epoch."""
        return (len(self.stream("train")) - 1) // self.context

    def steps_per_epoch(self, batch: int) -> int:
        """Steps in which every window is read; the last is filled up from the epoch's beginning."""
        if batch < 1:
            raise ConfigError(f"batch = {batch}: must be at least 1")
        return -(-self.train_size // batch)

    def train_batch(self, *, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's part of the batch of this step (the first step is 0)."""
        epoch, row = divmod(step, self.steps_per_epoch(batch))
        numbers = self._order(seed, epoch, batch)[row]
        mine = part(numbers, rank, world)
        return self._rows("train", [(n * self.context, self.context, 0) for n in mine.tolist()])

    def _order(self, seed: int, epoch: int, batch: int) -> Ids:
        key = (seed, epoch, batch)
        if self._epoch is None or self._epoch[0] != key:
            steps = self.steps_per_epoch(batch)
            windows = np.resize(shuffled(self.train_size, seed, epoch, _ORDER), steps * batch)
            self._epoch = (key, windows.reshape(steps, batch))
        return self._epoch[1]

    def eval_batches(
        self, split: str, batch: int, limit_tokens: int | None = None, *, stride: int | None = None
    ) -> Iterator[Batch]:
        """Every token of the split once, in order; the last batch may be short and the last window padded.

        With a stride below the context, windows overlap and a token is scored in the window that gives it the most
        context of those that reach it; `limit_tokens` stops after about so many scored tokens.
        """
        if batch < 1:
            raise ConfigError(f"batch = {batch}: must be at least 1")
        stride = self.context if stride is None else stride
        if not 1 <= stride <= self.context:
            raise ConfigError(f"stride = {stride}: must be between 1 and the context of {self.context}")
        windows = self._eval_windows(split, stride, limit_tokens)
        for first in range(0, len(windows), batch):
            yield self._rows(split, windows[first : first + batch])

    def _eval_windows(self, split: str, stride: int, limit: int | None) -> list[tuple[int, int, int]]:
        """(start, inputs, targets that an earlier window has scored) of each window."""
        scored, last = 0, len(self.stream(split)) - 1
        if last < 1:
            raise DataError(f"{self.name}: the {split} split has fewer than two tokens; nothing can be scored")
        windows = []
        while scored < last and (limit is None or scored < limit):
            end = min(last, self.context if not scored else scored + stride)
            start = max(0, end - self.context) if stride < self.context else scored
            windows.append((start, end - start, scored - start))
            scored = end
        return windows

    def _rows(self, split: str, windows: list[tuple[int, int, int]]) -> Batch:
        """A batch of windows: (start, inputs, leading targets that are not scored)."""
        stream = self.stream(split)
        inputs = np.full((len(windows), self.context), self.pad_id, dtype=np.int64)
        targets = np.full((len(windows), self.context), IGNORED, dtype=np.int64)
        for row, (start, length, skip) in enumerate(windows):
            ids = stream.read(start, start + length + 1)
            inputs[row, :length] = ids[:-1]
            targets[row, skip:length] = ids[skip + 1 :]
        batch = {"inputs": inputs, "targets": targets}
        if self.spec.packing == "documents":
            begins, lengths, _ = np.asarray(windows, dtype=np.int64).T
            batch["documents"] = stream.document_ids(begins, lengths, self.context)
        return batch

    def perplexity(self, split: str, nats_sum: float, tokens: int, *, stride: int | None = None) -> dict[str, Any]:
        """What a sum of nats over scored tokens of a split says."""
        held = self.store.index.splits[self._read_split(split)]  # type: ignore[index]
        text = perplexity.Text(tokens=held.tokens - 1, words=held.words, bytes=held.bytes, documents=held.documents)
        return perplexity.say(
            nats_sum,
            tokens,
            text,
            tokenizer=self.store.index.tokenizer.name,
            context=self.context,
            stride=stride,
            words=corpora.words_of(self.name),
        )

    def score(self, split: str, outputs: Any) -> dict[str, Any]:
        """The interface of all sources: `outputs` are (sum of nats, scored tokens)."""
        nats_sum, tokens = outputs
        return self.perplexity(split, float(nats_sum), int(tokens))
