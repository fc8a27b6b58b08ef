"""The recall task against its own definition, read sequence by sequence in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.recall import RecallSource, ladder
from oelm.data.spec import DataSpec
from oelm.errors import ConfigError, DataError


def source(**more: object) -> RecallSource:
    known = {"name": "recall", "context": 64, "pairs": 8, "symbols": 64, "examples": 600}
    return RecallSource(DataSpec.model_validate(known | more))


def check_sequence(tokens: list[int], targets: list[int], distance: list[int], pairs: int, keys: int) -> None:
    given = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
    assert len(given) == pairs  # keys of a sequence differ
    assert all(1 <= key <= keys < value for key, value in given.items())
    asked = []
    for place, token in enumerate(tokens):
        if place >= 2 * pairs and token <= keys:
            asked.append(token)
            assert targets[place] == given[token] == tokens[place + 1]
            assert distance[place] == place - tokens.index(token)
        else:
            assert targets[place] == -100
            assert distance[place] == 0
    assert sorted(asked) == sorted(given)  # every key is asked exactly once


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 10), st.integers(0, 40), st.integers(0, 2**63 - 1), st.sampled_from(["train", "validation", "test"])
)
def test_sequences_are_what_the_task_says(pairs: int, more: int, seed: int, split: str) -> None:
    made = source(pairs=pairs, context=4 * pairs + more, symbols=2 * pairs + more % 5 + 4, seed=seed)
    batch = next(made.eval_batches(split, 16))
    assert batch["inputs"].min() >= 1
    assert batch["inputs"].max() < made.vocab_size
    for row in range(16):
        assert batch["pairs"][row] in ladder(pairs)
        arrays = (batch[name][row].tolist() for name in ("inputs", "targets", "distance"))
        check_sequence(*arrays, pairs=int(batch["pairs"][row]), keys=made.keys)


def test_batches_are_a_pure_function_and_ranks_share_them() -> None:
    used, fresh = source(), source()
    list(used.eval_batches("validation", 64))
    used.train_batch(seed=3, step=99, batch=8)
    whole = used.train_batch(seed=3, step=7, batch=8)
    parts = [fresh.train_batch(seed=3, step=7, batch=8, rank=rank, world=4) for rank in range(4)]
    for name, array in whole.items():
        assert np.array_equal(array, np.concatenate([one[name] for one in parts]))


def test_splits_and_seeds_share_no_sequence() -> None:
    found = {}
    for name, made, split in (
        ("train", source(), "train"),
        ("validation", source(), "validation"),
        ("test", source(), "test"),
        ("other seed", source(seed=1), "validation"),
    ):
        found[name] = {row.tobytes() for batch in made.eval_batches(split, 100) for row in batch["inputs"]}
    names = list(found)
    assert not any(found[a] & found[b] for a in names for b in names if a < b)
    assert len(found["validation"]) == 2048
    assert len(found["train"]) == 600


def test_score_by_pairs_and_distance() -> None:
    made = source()
    outputs = []
    for batch in made.eval_batches("validation", 100):
        said = batch["targets"].copy()
        said[batch["pairs"] == 8] = 0  # wrong wherever there are 8 pairs
        outputs.append((batch["index"], said))
    scored = made.score("validation", outputs, per_example=True)
    assert scored["by_pairs"] == {"2": 1.0, "4": 1.0, "8": 0.0}
    assert scored["examples"] == 2048
    batches = next(iter(made.eval_batches("validation", 2048)))
    asked = batches["targets"] != -100
    right = asked & (batches["pairs"] != 8)[:, None]
    assert scored["accuracy"] == pytest.approx(right.sum() / asked.sum())
    assert scored["questions"] == asked.sum()
    far = asked & (batches["distance"] >= 32) & (batches["distance"] < 64)
    assert scored["by_distance"]["32"] == pytest.approx((far & right).sum() / far.sum())
    assert scored["per_example"]["0"] in (0.0, 1.0)


def test_logits_are_read_by_their_largest() -> None:
    made = source()
    batch = next(made.eval_batches("test", 4))
    logits = np.zeros((4, 64, made.vocab_size))
    np.put_along_axis(logits, np.maximum(batch["targets"], 0)[..., None], 1.0, axis=-1)
    assert made.score("test", [(batch["index"], logits)])["accuracy"] == 1.0


def test_the_originals_protocol_reads_test() -> None:
    leaky, honest = source(selection="test"), source()
    one = next(leaky.eval_batches("validation", 8))["inputs"]
    assert np.array_equal(one, next(honest.eval_batches("test", 8))["inputs"])
    assert leaky.provenance["selection"] == "test"
    assert leaky.fingerprint != honest.fingerprint


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pairs": 17}, "data.pairs = 17 needs 68 tokens"),
        ({"pairs": 8, "symbols": 15}, "data.pairs = 8 needs as many different keys"),
    ],
)
def test_what_does_not_fit_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        source(**more)


def test_unknown_splits_and_examples_are_refused() -> None:
    made = source()
    with pytest.raises(DataError, match="recall has no split 'dev'"):
        next(made.eval_batches("dev", 4))
    with pytest.raises(DataError, match="example 5000 is not in validation"):
        made.score("validation", [(np.array([5000]), np.zeros((1, 64), dtype=int))])
    with pytest.raises(DataError, match="no prediction to score"):
        made.score("validation", [])


def test_the_first_sequence_is_fixed_for_ever() -> None:
    batch = next(source().eval_batches("validation", 1))
    assert int(batch["index"][0]) == GOLDEN_INDEX
    assert batch["inputs"][0, :12].tolist() == GOLDEN


GOLDEN_INDEX = 426
GOLDEN = [15, 35, 31, 50, 20, 33, 22, 63, 32, 55, 16, 37]
