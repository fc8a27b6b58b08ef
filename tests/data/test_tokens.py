"""Tokenizers by name: known ids, exact round trips, and hashes that tell two of them apart."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import reading, sources, tokens
from oelm.data.corpora import DemoFound
from oelm.errors import DataError


SHARED = sources.shared_folder()
needs_shared = pytest.mark.skipif(SHARED is None, reason="../shared/data is not here")


@given(st.text(max_size=200))
@settings(max_examples=150, deadline=None)
def test_bytes_are_the_bytes_of_utf8(text: str) -> None:
    made = tokens.load_tokens("bytes")
    assert made.encode(text) == list(text.encode())
    assert made.decode(made.encode(text)) == text


def test_bytes_have_one_id_more_than_bytes() -> None:
    made = tokens.load_tokens("bytes")
    assert (made.vocab_size, made.eos_id, made.pad_id) == (257, 256, 256)


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_demo_tokenizer_round_trips_everything(text: str) -> None:
    made = tokens.load_tokens("demo-bpe")
    ids = made.encode(text)
    assert made.decode(ids) == text
    assert all(0 <= i < made.vocab_size and i != made.eos_id for i in ids)


def test_end_of_text_inside_a_text_is_text() -> None:
    for name in ("bytes", "demo-bpe"):
        made = tokens.load_tokens(name)
        text = "a <|endoftext|> b"
        assert made.eos_id not in made.encode(text)
        assert made.decode(made.encode(text)) == text


def test_demo_tokenizer_is_the_same_in_every_process() -> None:
    code = "from oelm.data.tokens import load_tokens; print(load_tokens('demo-bpe').hash)"
    prints = set()
    for threads, seed in (("1", "1"), ("3", "2")):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        prints.add(done.stdout.strip())
    assert prints == {tokens.load_tokens("demo-bpe").hash}


def test_demo_tokenizer_reads_only_the_training_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = DemoFound.rows

    def watched(self: DemoFound, split: str) -> object:
        asked.append(split)
        return real(self, split)

    monkeypatch.setattr(DemoFound, "rows", watched)
    tokens._demo_bpe.__wrapped__()
    assert asked == ["train"]


@given(st.text(alphabet="    \n\tab'sZé.7日", max_size=400), st.integers(9, 60))
@settings(max_examples=200, deadline=None)
def test_tokens_of_pieces_are_the_tokens_of_the_document(text: str, limit: int) -> None:
    made = tokens.load_tokens("demo-bpe")
    pieces = list(reading.cut(text, limit))
    if max((len(run) for run in re.findall(r"[ \n\t]+|[^ \n\t]+", text)), default=0) < limit:
        assert [i for piece in pieces for i in made.encode(piece.text)] == made.encode(text)


def test_encode_batch_is_encode() -> None:
    texts = [row["text"][:500] for row in DemoFound().rows("train")]
    for made in (tokens.load_tokens("demo-bpe"), tokens.load_tokens("bytes")):
        wanted = [made.encode(text) for text in texts]
        assert made.encode_batch(texts) == wanted
        assert [row.tolist() for row in made.arrays(texts)] == wanted


def test_the_hash_sees_ids_and_not_layout(tmp_path: Path) -> None:
    made = tokens.load_tokens("demo-bpe")
    whole = json.loads(made.to_json())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole, indent=2))
    assert tokens.load_tokens(str(path)).hash == made.hash
    assert tokens.load_tokens(str(tmp_path)).hash == made.hash
    first, second = whole["model"]["merges"][-2:]
    whole["model"]["merges"][-2:] = [second, first]
    path.write_text(json.dumps(whole))
    assert tokens.load_tokens(str(path)).hash != made.hash


@pytest.mark.parametrize(("data", "said"), [(b"{}", "is not a tokenizer.json"), (b"\xff\xfe", "is not UTF-8")])
def test_a_bad_file_is_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=said) as caught:
        tokens.load_tokens(str(path))
    assert "\n" not in str(caught.value)


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'gpt2'"):
        tokens.load_tokens("gpt-2")
    for name in ("x" * 300, "x/" * 5000, "none"):
        with pytest.raises(DataError, match="is unknown"):
            tokens.load_tokens(name)
    with pytest.raises(DataError, match="no such tokenizer file"):
        tokens.load_tokens(str(tmp_path / "none.json"))


def test_a_tokenizer_of_another_size_is_not_gpt2(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizers" / "gpt2"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokens.load_tokens("bytes").to_json())
    with pytest.raises(DataError, match="257 tokens, gpt2 has 50,257"):
        tokens.load_tokens("gpt2", tmp_path)


def test_not_here_and_no_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sources, "shared_folder", lambda: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(DataError, match=r"tokenizers/gpt2/tokenizer\.json"):
        tokens.load_tokens("gpt2")


@needs_shared
def test_known_ids_of_the_real_tokenizers() -> None:
    gpt2 = tokens.load_tokens("gpt2")
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)
    bert = tokens.load_tokens("bert")
    assert bert.encode("Hello world!") == [7592, 2088, 999]
    assert (bert.vocab_size, bert.pad_id, bert.cls_id, bert.sep_id, bert.unk_id) == (30522, 0, 101, 102, 100)


@needs_shared
@given(st.text(max_size=100))
@settings(max_examples=60, deadline=None)
def test_gpt2_round_trips(text: str) -> None:
    gpt2 = tokens.load_tokens("gpt2")
    assert gpt2.decode(gpt2.encode(text)) == text
