"""Batches of a language model: every token once, the same for any number of workers, exact after a restart."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.open import load
from oelm.data.prepare import Wanted, prepared
from oelm.data.sources import local_files
from oelm.data.spec import DataSpec
from oelm.data.store import Store
from oelm.data.tokens import load_tokens
from oelm.data.windows import LmSource
from oelm.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("texts")
    for split, count in (("train", 90), ("validation", 12), ("test", 11)):
        rows = [f"{split} document {n} " + "abc " * (n % 17) for n in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = local_files(folder, {"text": "text"}, "lm")
    base = tmp_path_factory.mktemp("stores")
    return prepared(Wanted(found=found, tokens=load_tokens("bytes"), shard_tokens=800), base=base)


def _source(store: Store, **more: object) -> LmSource:
    table = {"name": "local", "path": "texts", "task": "lm", "tokenizer": "bytes", "context": 16} | more
    return LmSource(DataSpec.model_validate(table), store)


def test_an_epoch_reads_every_window_once(store: Store) -> None:
    source = _source(store)
    ids = source.stream("train").read(0, len(source.stream("train")))
    windows = [tuple(ids[n * 16 : n * 16 + 17]) for n in range((len(ids) - 1) // 16)]
    assert source.train_size == len(windows)
    for batch in (1, 8, source.train_size, source.train_size + 3):
        steps = source.steps_per_epoch(batch)
        assert steps == -(-len(windows) // batch)
        for epoch in (0, 1):
            seen = []
            for step in range(epoch * steps, (epoch + 1) * steps):
                made = source.train_batch(seed=3, step=step, batch=batch)
                assert made["inputs"].shape == made["targets"].shape == (batch, 16)
                seen += [
                    (*map(int, inputs), int(targets[-1]))
                    for inputs, targets in zip(made["inputs"], made["targets"], strict=True)
                ]
                assert np.array_equal(made["inputs"][:, 1:], made["targets"][:, :-1])
            assert sorted(seen[: len(windows)]) == sorted(windows)
            assert seen[len(windows) :] == seen[: steps * batch - len(windows)]


def test_epochs_and_seeds_have_orders_of_their_own(store: Store) -> None:
    source = _source(store)
    steps = source.steps_per_epoch(4)
    first = source.train_batch(seed=1, step=0, batch=4)["inputs"]
    assert not np.array_equal(first, source.train_batch(seed=1, step=steps, batch=4)["inputs"])
    assert not np.array_equal(first, source.train_batch(seed=2, step=0, batch=4)["inputs"])


@given(step=st.integers(0, 5000), seed=st.integers(0, 2**63 - 1), world=st.sampled_from([1, 2, 3, 4, 6, 12]))
@settings(max_examples=60, deadline=None)
def test_ranks_share_the_batch_and_nothing_is_remembered(store: Store, step: int, seed: int, world: int) -> None:
    source = _source(store)
    source.train_batch(seed=5, step=1234, batch=12)
    parts = [source.train_batch(seed=seed, step=step, batch=12, rank=rank, world=world) for rank in range(world)]
    whole = _source(store).train_batch(seed=seed, step=step, batch=12)
    for name in ("inputs", "targets"):
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_the_order_is_fixed_for_good(store: Store) -> None:
    """If this fails, every run that is continued reads other data than it would have: keep the old order."""
    source = _source(store)
    bits = np.random.Philox(np.random.SeedSequence([42, 0, 0x6C6D])).random_raw(source.train_size)
    assert source._order(42, 0, 4)[:2].ravel().tolist() == np.argsort(bits, kind="stable")[:8].tolist()
    assert source._order(42, 0, 4)[0].tolist() == [249, 277, 128, 238]


def test_a_batch_that_ranks_cannot_share_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="cannot be shared by 3 ranks"):
        _source(store).train_batch(seed=0, step=0, batch=8, rank=0, world=3)
    with pytest.raises(ConfigError, match="at least 1"):
        _source(store).train_batch(seed=0, step=0, batch=0)


@given(batch=st.integers(1, 50), context=st.integers(2, 700))
@settings(max_examples=40, deadline=None)
def test_evaluation_scores_every_token_once_in_order(store: Store, batch: int, context: int) -> None:
    source = _source(store, context=context)
    stream = source.stream("validation")
    scored = [int(t) for made in source.eval_batches("validation", batch) for t in made["targets"].ravel() if t != -100]
    assert scored == stream.read(1, len(stream)).tolist()


@given(context=st.integers(2, 120), data=st.data())
@settings(max_examples=60, deadline=None)
def test_sliding_windows_score_every_token_once_with_more_context(
    store: Store, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    source = _source(store, context=context)
    ids = source.stream("test").read(0, len(source.stream("test")))
    position = 1
    for made in source.eval_batches("test", 7, stride=stride):
        for inputs, targets in zip(made["inputs"], made["targets"], strict=True):
            places = np.flatnonzero(targets != -100)
            assert np.array_equal(targets[places], ids[position : position + len(places)])
            begin = position - int(places[0]) - 1
            assert np.array_equal(inputs[: places[-1] + 1], ids[begin : begin + places[-1] + 1])
            assert begin or len(places) == min(context, len(ids) - 1)
            if begin:
                assert places[0] >= context - stride  # how much a scored token sees at the least
            position += len(places)
    assert position == len(ids)


def test_stride_of_the_context_is_no_sliding(store: Store) -> None:
    source = _source(store)
    plain, sliding = (list(source.eval_batches("test", 5, stride=stride)) for stride in (None, 16))
    assert all(np.array_equal(a["targets"], b["targets"]) for a, b in zip(plain, sliding, strict=True))
    for stride in (0, 17):
        with pytest.raises(ConfigError, match="stride"):
            next(source.eval_batches("test", 5, stride=stride))


def test_evaluation_can_stop_early(store: Store) -> None:
    source = _source(store)
    scored = sum(int((made["targets"] != -100).sum()) for made in source.eval_batches("train", 3, limit_tokens=100))
    assert 100 <= scored < 100 + 16


def test_packed_documents_number_what_belongs_together(store: Store) -> None:
    source = _source(store, packing="documents", context=40)
    for made in source.eval_batches("train", 8):
        for inputs, documents in zip(made["inputs"], made["documents"], strict=True):
            ends = inputs == 256  # comes first in each document
            ends[0] = False
            length = int((documents >= 0).sum())
            assert np.array_equal(documents[:length], np.cumsum(ends)[:length])
            assert (documents[length:] == -1).all()
    assert "documents" in source.train_batch(seed=0, step=0, batch=2)


def test_only_asked_for_tokens_are_read(store: Store) -> None:
    source = _source(store, tokens=333)
    assert source.train_size == 20
    assert source.fingerprint == store.fingerprint(333) != _source(store).fingerprint
    assert "333 training tokens" in source.provenance["note"]
    assert source.provenance["splits"]["train"]["tokens"] == 333


def test_the_original_protocol_reads_the_test_split_and_says_so(store: Store) -> None:
    honest, original = _source(store), _source(store, selection="test")
    (a, *_), (b, *_) = list(honest.eval_batches("test", 4)), list(original.eval_batches("validation", 4))
    assert np.array_equal(a["inputs"], b["inputs"])
    assert "replication only" in original.provenance["note"]
    assert "replication" not in honest.provenance["note"]


def test_too_short_and_unknown_splits_are_refused(store: Store) -> None:
    tokens = len(store.stream("train"))
    with pytest.raises(DataError, match="fewer than one window of 5,000"):
        _source(store, context=5000)
    assert _source(store, context=tokens - 1).train_size == 1
    with pytest.raises(DataError, match="no split 'valid'"):
        next(_source(store).eval_batches("valid", 4))


def test_reading_a_batch_is_quick(store: Store) -> None:
    source = _source(store)
    source.train_batch(seed=0, step=0, batch=8)
    begun = time.perf_counter()
    for step in range(200):
        source.train_batch(seed=0, step=step, batch=8)
    assert (time.perf_counter() - begun) / 200 < 0.01  # about 0.05 ms where nothing else runs


def test_demo_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_HOME", str(tmp_path))
    source = load(DataSpec(name="demo", tokenizer="demo-bpe", context=64))
    again = load(DataSpec(name="demo", tokenizer="demo-bpe", context=64))
    assert source.fingerprint == again.fingerprint
    assert (source.kind, source.labels, source.vocab_size, source.pad_id) == ("lm", (), 1536, 0)
    assert source.provenance["status"] == "demo"
    assert source.provenance["perplexity"] == {"context": 64, "stride": 64, "word_count": "spaces"}
    assert source.train_size > 1000
    with pytest.raises(ConfigError, match="tokens"):
        load(DataSpec(name="demo", tokenizer="bytes", examples=5))
