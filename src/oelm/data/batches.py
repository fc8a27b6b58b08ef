"""Which examples share a batch, and how ragged examples become padded arrays.

Owns the order of a training epoch and the shapes of batches: both are pure functions of (seed, epoch) and the lengths,
so there is no loader state to save. Refuses a batch that its ranks cannot share evenly.

Every batch of training is full: the last of an epoch is filled up with the examples that the epoch began with, so each
example is read at least once an epoch and shapes stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from oelm.errors import ConfigError, DataError


Index = npt.NDArray[np.int64]

ROUND_TO = 8  # padded lengths are multiples of this: few shapes, and kernels like them
_CHUNK = 64  # batches that are sorted by length together; larger: less padding, less mixing
_TRAIN, _EVALUATION = 0x7472, 0x6576  # separate streams of one seed


def shuffled(count: int, *entropy: int) -> Index:
    """A permutation of range(count) that depends on the numbers given alone.

    Sorts raw bits of Philox: those are fixed by its definition, where numpy may change `Generator.permutation`.
    """
    bits = np.random.Philox(np.random.SeedSequence([int(number) for number in entropy]))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


def padded_length(longest: int, context: int, pad_to: int | None = None) -> int:
    """The width of a batch whose longest example has `longest` tokens; `pad_to` fixes it for captured graphs."""
    if pad_to is not None:
        if pad_to < longest:
            raise ConfigError(f"pad_to = {pad_to} is shorter than an example of {longest} tokens; use {context}")
        return pad_to
    return min(context, -(-longest // ROUND_TO) * ROUND_TO)


def part(rows: Index, rank: int, world: int) -> Index:
    """The rows of one rank: rank 0 has the first, and all parts together are the batch."""
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of world {world}: ranks go from 0 to world - 1")
    if len(rows) % world:
        raise ConfigError(f"a batch of {len(rows)} cannot be shared by {world} ranks; use a multiple of {world}")
    share = len(rows) // world
    return rows[rank * share : (rank + 1) * share]


class Order:
    """The order in which examples of these lengths are read."""

    def __init__(self, lengths: npt.ArrayLike, *, bucketing: bool) -> None:
        self.lengths: Index = np.asarray(lengths, dtype=np.int64)
        self.bucketing = bucketing
        self._epoch: tuple[tuple[int, int, int], Index] | None = None  # the last epoch asked for: a memory, not a state

    def steps(self, batch: int) -> int:
        """Batches of one epoch."""
        if batch < 1:
            raise ConfigError(f"batch = {batch}: must be at least 1")
        if not len(self.lengths):
            raise DataError("0 training batches: the training split has no example")
        return -(-len(self.lengths) // batch)

    def epoch(self, *, seed: int, epoch: int, batch: int) -> Index:
        """All batches of one epoch, one a row."""
        key = (seed, epoch, batch)
        if self._epoch is None or self._epoch[0] != key:
            steps = self.steps(batch)
            rows = np.resize(shuffled(len(self.lengths), seed, epoch, _TRAIN), steps * batch)
            if self.bucketing:
                rows = self._sorted_in_chunks(rows, batch)
            batches = rows.reshape(steps, batch)[shuffled(steps, seed, epoch, _TRAIN + 1)]
            self._epoch = (key, batches)
        return self._epoch[1]

    def train(self, *, seed: int, step: int, batch: int) -> Index:
        """The examples of training step `step`, counted from 0 over all epochs."""
        if step < 0:
            raise ConfigError(f"step {step}: steps count from 0")
        epoch, within = divmod(step, self.steps(batch))
        chosen: Index = self.epoch(seed=seed, epoch=epoch, batch=batch)[within]
        return chosen

    def evaluation(self, batch: int) -> Iterator[Index]:
        """Every example once in a fixed mixed order, so that the first batches are a fair sample; the last may be short."""
        if batch < 1:
            raise ConfigError(f"batch = {batch}: must be at least 1")
        rows = shuffled(len(self.lengths), len(self.lengths), _EVALUATION)
        full = len(rows) // batch * batch
        head, tail = rows[:full], rows[full:]
        if self.bucketing and full:
            head = self._sorted_in_chunks(head, batch)
        batches = head.reshape(-1, batch)
        yield from batches[shuffled(len(batches), len(rows), _EVALUATION + 1)]
        if len(tail):
            yield tail

    def waste(self, batch: int, context: int) -> float:
        """The share of padding among the tokens of one training epoch (that of seed 0)."""
        lengths = self.lengths[self.epoch(seed=0, epoch=0, batch=batch)]
        widths = [padded_length(int(longest), context) for longest in lengths.max(axis=1)]
        return 1.0 - float(lengths.sum()) / (batch * float(sum(widths)))

    def _sorted_in_chunks(self, rows: Index, batch: int) -> Index:
        size = _CHUNK * batch
        chunks = (rows[start : start + size] for start in range(0, len(rows), size))
        return np.concatenate([chunk[np.argsort(self.lengths[chunk], kind="stable")] for chunk in chunks])


def padded(
    flat: npt.NDArray[np.integer], offsets: Index, rows: Index, width: int, fill: int
) -> tuple[Index, npt.NDArray[np.bool_]]:
    """The chosen ragged rows side by side in (rows, width), and which entries are real."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    columns = np.arange(width)
    mask = columns[None, :] < lengths[:, None]
    places = np.minimum(starts[:, None] + columns[None, :], max(len(flat) - 1, 0))
    return np.where(mask, flat[places], fill).astype(np.int64), mask
