"""Perplexity in its measures, against closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data.open import load
from oelm.data.perplexity import Text, say
from oelm.data.spec import DataSpec
from oelm.errors import ConfigError


HOW = {"tokenizer": "gpt2", "context": 512, "stride": None, "words": "spaces"}


@given(st.integers(2, 500), st.integers(1, 10**6))
def test_a_uniform_model(vocabulary: int, tokens: int) -> None:
    text = Text(tokens=tokens, words=tokens, bytes=tokens, documents=1)
    said = say(tokens * math.log(vocabulary), tokens, text, **HOW)  # type: ignore[arg-type]
    assert said["perplexity"] == pytest.approx(vocabulary)
    assert said["perplexity_per_word"] == pytest.approx(vocabulary)
    assert said["bits_per_byte"] == pytest.approx(math.log2(vocabulary))
    assert said["nats_per_token"] == pytest.approx(math.log(vocabulary))
    assert said["whole"]


def test_words_and_bytes_divide_the_same_sum() -> None:
    said = say(1000.0, 400, Text(tokens=400, words=250, bytes=2000, documents=3), **HOW)  # type: ignore[arg-type]
    assert said["perplexity"] == pytest.approx(math.exp(2.5))
    assert said["perplexity_per_word"] == pytest.approx(math.exp(4.0))
    assert said["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert (said["tokenizer"], said["context"], said["stride"]) == ("gpt2", 512, 512)


def test_a_part_is_taken_in_proportion_and_says_so() -> None:
    text = Text(tokens=400, words=200, bytes=1600, documents=3)
    part = say(250.0, 100, text, **HOW)  # type: ignore[arg-type]
    whole = say(1000.0, 400, text, **HOW)  # type: ignore[arg-type]
    assert not part["whole"]
    for name in ("perplexity", "perplexity_per_word", "bits_per_byte"):
        assert part[name] == pytest.approx(whole[name])


def test_what_cannot_be_is_refused_or_null() -> None:
    text = Text(tokens=10, words=0, bytes=40, documents=1)
    for nats, tokens in ((1.0, 0), (1.0, 11), (math.nan, 5), (-1.0, 5)):
        with pytest.raises(ConfigError):
            say(nats, tokens, text, **HOW)  # type: ignore[arg-type]
    said = say(1e9, 10, text, **HOW)  # type: ignore[arg-type]
    assert said["perplexity"] is None
    assert said["perplexity_per_word"] is None
    assert said["bits_per_byte"] > 0
    assert json.loads(json.dumps(say(np.float64(3.0), 10, text, **HOW)))["tokens"] == 10  # type: ignore[arg-type]


def test_bits_per_byte_of_a_byte_model_is_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_HOME", str(tmp_path))
    source = load(DataSpec(name="demo", tokenizer="bytes", context=128))
    tokens = sum(int((batch["targets"] != -100).sum()) for batch in source.eval_batches("test", 16))
    said = source.score("test", (tokens * math.log(257), tokens))
    index = source.store.index.splits["test"]
    # Each scored token is a byte but for the ends of documents, one fewer than there are documents.
    assert tokens == index.bytes + index.documents - 1
    assert said["bits_per_byte"] == pytest.approx(math.log2(257) * tokens / index.bytes)
    assert said["whole"]
    assert said["words"] == index.words
