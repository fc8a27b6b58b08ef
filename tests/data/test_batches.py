"""Order and padding: pure functions, every example once an epoch, ranks that make up the batch, little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.batches import Order, padded, padded_length, part, shuffled
from oelm.errors import ConfigError, DataError


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def test_the_shuffle_is_fixed_for_ever() -> None:
    assert shuffled(8, 42, 0).tolist() == GOLDEN
    assert sorted(shuffled(100, 1).tolist()) == list(range(100))
    assert shuffled(100, 1).tolist() != shuffled(100, 2).tolist()


GOLDEN = [0, 1, 4, 2, 6, 5, 7, 3]


@settings(deadline=None)
@given(lengths, st.integers(1, 20), st.booleans(), st.integers(0, 2**63 - 1), st.integers(0, 3))
def test_an_epoch_reads_every_example(sizes: list[int], batch: int, bucketing: bool, seed: int, epoch: int) -> None:
    order = Order(sizes, bucketing=bucketing)
    steps = order.steps(batch)
    read = [order.train(seed=seed, step=epoch * steps + step, batch=batch) for step in range(steps)]
    assert all(len(rows) == batch for rows in read)
    counts = np.bincount(np.concatenate(read), minlength=len(sizes))
    assert counts.min() >= 1
    assert counts.max() - counts.min() <= 1  # only what fills the last batch up is read once more


@settings(deadline=None)
@given(lengths, st.integers(1, 20), st.booleans(), st.integers(0, 200))
def test_a_batch_depends_on_its_arguments_alone(sizes: list[int], batch: int, bucketing: bool, step: int) -> None:
    used, fresh = Order(sizes, bucketing=bucketing), Order(sizes, bucketing=bucketing)
    for other in (0, step + 7, 3):  # what was asked before leaves no trace
        used.train(seed=9, step=other, batch=batch)
    assert np.array_equal(used.train(seed=1, step=step, batch=batch), fresh.train(seed=1, step=step, batch=batch))


@settings(deadline=None)
@given(lengths, st.integers(1, 20), st.booleans())
def test_evaluation_reads_every_example_once(sizes: list[int], batch: int, bucketing: bool) -> None:
    order = Order(sizes, bucketing=bucketing)
    read = list(order.evaluation(batch))
    assert sorted(np.concatenate(read).tolist()) == list(range(len(sizes)))
    assert all(len(rows) == batch for rows in read[:-1])
    assert [rows.tolist() for rows in read] == [rows.tolist() for rows in order.evaluation(batch)]


def test_epochs_and_seeds_differ() -> None:
    order = Order(np.full(200, 5), bucketing=False)
    first = order.epoch(seed=1, epoch=0, batch=8).tolist()
    assert first != order.epoch(seed=1, epoch=1, batch=8).tolist()
    assert first != order.epoch(seed=2, epoch=0, batch=8).tolist()


def test_buckets_save_padding_and_still_mix() -> None:
    sizes = np.random.default_rng(0).lognormal(4, 0.8, 5000).clip(4, 512).astype(int)
    mixed, sorted_ = Order(sizes, bucketing=False), Order(sizes, bucketing=True)
    assert sorted_.waste(16, 512) < 0.1 < mixed.waste(16, 512)
    first = [int(sizes[sorted_.train(seed=0, step=step, batch=16)].mean()) for step in range(50)]
    assert first != sorted(first)  # batches do not come in the order of length
    one, two = sorted_.epoch(seed=0, epoch=0, batch=16), sorted_.epoch(seed=0, epoch=1, batch=16)
    assert {tuple(sorted(rows)) for rows in one.tolist()} & {tuple(sorted(rows)) for rows in two.tolist()} == set()


def test_waste_is_the_share_of_padding() -> None:
    order = Order([8, 8, 16, 16], bucketing=False)
    rows = order.epoch(seed=0, epoch=0, batch=2)
    widths = [max(order.lengths[pair]) for pair in rows]
    assert order.waste(2, 64) == pytest.approx(1 - 48 / (2 * sum(widths)))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 6))
def test_ranks_make_up_the_batch(share: int, world: int) -> None:
    rows = np.arange(share * world)
    assert np.array_equal(np.concatenate([part(rows, rank, world) for rank in range(world)]), rows)


def test_bad_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch of 10 cannot be shared by 4 ranks"):
        part(np.arange(10), 0, 4)
    with pytest.raises(ConfigError, match="rank 4 of world 4"):
        part(np.arange(8), 4, 4)
    with pytest.raises(DataError, match="0 training batches"):
        Order([], bucketing=True).steps(4)
    with pytest.raises(ConfigError, match="batch = 0"):
        Order([1], bucketing=True).steps(0)
    with pytest.raises(ConfigError, match="step -1"):
        Order([1], bucketing=True).train(seed=0, step=-1, batch=1)


def test_widths_are_few() -> None:
    assert [padded_length(n, 512) for n in (1, 8, 9, 500, 512)] == [8, 8, 16, 504, 512]
    assert padded_length(99, 100) == 100
    assert padded_length(99, 512, pad_to=512) == 512
    with pytest.raises(ConfigError, match="pad_to = 64 is shorter than an example of 99"):
        padded_length(99, 512, pad_to=64)


@settings(deadline=None)
@given(lengths, st.data())
def test_padding_keeps_every_token(sizes: list[int], data: st.DataObject) -> None:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    flat = np.arange(1, offsets[-1] + 1, dtype=np.uint16)
    rows = np.asarray(data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=8)))
    wide, mask = padded(flat, offsets, rows, 64, 0)
    for line, real, row in zip(wide, mask, rows, strict=True):
        assert line[real].tolist() == flat[offsets[row] : offsets[row + 1]].tolist()
        assert not line[~real].any()
