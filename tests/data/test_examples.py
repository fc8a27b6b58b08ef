"""Layouts of examples against the tokenizers' own templates and truncation, and against plain re-reading of the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from oelm.data.examples import (
    IGNORED,
    NO_SECOND,
    classify_arrays,
    longest_first,
    qa_arrays,
    tag_arrays,
    texts_of,
)
from oelm.data.tables import Labelled, Question, Tagged, questions
from oelm.data.tokens import Tokens, load_tokens
from oelm.errors import ConfigError


LETTERS = "abcdefgh"


def word_piece() -> Tokenizer:
    """A small WordPiece with BERT's template: letters, and some words of two pieces."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", "cat", "sat"]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    word_piece().save(str(path))
    return load_tokens(str(path))


@pytest.fixture(scope="module")
def byte_tokens() -> Tokens:
    return load_tokens("bytes")


def row(arrays: dict[str, np.ndarray], number: int, name: str = "ids") -> list[int]:
    return arrays[name][arrays["offsets"][number] : arrays["offsets"][number + 1]].tolist()


text = st.text(alphabet=LETTERS + " .", max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(text, text), min_size=1, max_size=5), st.integers(6, 40))
def test_pairs_are_the_tokenizers_own(bert: Tokens, pairs: list[tuple[str, str]], context: int) -> None:
    reference = word_piece()
    reference.enable_truncation(context, strategy="longest_first")
    first, second = (list(side) for side in zip(*pairs, strict=True))
    arrays = classify_arrays(Labelled(first, second, [0] * len(pairs)), bert, context)
    for number, (one, other) in enumerate(pairs):
        expected = reference.encode(one, other)
        assert row(arrays, number) == expected.ids
        types = [int(place >= arrays["second"][number]) for place in range(len(expected.ids))]
        assert types == expected.type_ids
        whole = len(word_piece().encode(one, other).ids)
        assert arrays["cut"][number] == whole - len(expected.ids)


@settings(max_examples=40, deadline=None)
@given(st.lists(text, min_size=1, max_size=5), st.integers(4, 30))
def test_single_texts_are_the_tokenizers_own(bert: Tokens, texts: list[str], context: int) -> None:
    reference = word_piece()
    reference.enable_truncation(context)
    arrays = classify_arrays(Labelled(texts, None, list(range(len(texts)))), bert, context)
    for number, one in enumerate(texts):
        assert row(arrays, number) == reference.encode(one).ids
        assert arrays["second"][number] == NO_SECOND
    assert arrays["labels"].tolist() == list(range(len(texts)))


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(2, 80))
def test_longest_first_cuts_one_token_at_a_time(first: int, second: int, room: int) -> None:
    one, other = first, second
    while one + other > room:  # the definition, up to which of two equal parts goes first
        if one > other:
            one -= 1
        else:
            other -= 1
    kept = longest_first(first, second, room)
    assert sum(kept) == one + other
    assert sorted(kept) == sorted((one, other))


def test_bytes_are_parted_by_the_end_token(byte_tokens: Tokens) -> None:
    arrays = classify_arrays(Labelled(["ab", ""], ["c", "d"], [0, 1]), byte_tokens, 8)
    assert row(arrays, 0) == [97, 98, 256, 99]
    assert row(arrays, 1) == [256, 100]
    assert set(arrays["second"].tolist()) == {NO_SECOND}  # GPT has no types
    single = classify_arrays(Labelled(["abc", ""], None, [0, 1]), byte_tokens, 2)
    assert row(single, 0) == [97, 98]
    assert row(single, 1) == [256]  # an empty text still is an example
    assert single["cut"].tolist() == [1, 0]


def test_models_without_types_get_none(bert: Tokens) -> None:
    backend = Tokenizer.from_str(word_piece().to_str().replace("[CLS]", "<s>").replace("[SEP]", "</s>"))
    tokens = Tokens(**{**bert.__dict__, "backend": backend})
    arrays = classify_arrays(Labelled(["a"], ["b"], [0]), tokens, 8)
    assert row(arrays, 0) == [2, 4, 3, 5, 3]
    assert arrays["second"].tolist() == [NO_SECOND]


def test_special_tokens_in_a_text_are_text(bert: Tokens, byte_tokens: Tokens) -> None:
    arrays = classify_arrays(Labelled(["a [SEP] b"], None, [0]), bert, 32)
    assert row(arrays, 0).count(3) == 1
    arrays = classify_arrays(Labelled(["a<|endoftext|>b"], None, [0]), byte_tokens, 64)
    assert 256 not in row(arrays, 0)


def test_the_first_piece_of_a_word_carries_its_tag(bert: Tokens) -> None:
    names = ("O", "B-x", "I-x")
    data = Tagged([["ab", "cat", "\u200b"], ["a"]], [["B-x", "I-x", "O"], ["O"]])
    arrays = tag_arrays(data, names, bert, 16)
    assert row(arrays, 0) == [2, 4, 13, 21, 1, 3]  # [CLS] a ##b cat [UNK] [SEP]: a word of nothing visible is a word
    assert row(arrays, 0, "tags") == [IGNORED, 1, IGNORED, 2, 0, IGNORED]
    assert arrays["truth"].tolist() == [1, 2, 0, 0]
    assert arrays["words"].tolist() == [0, 3, 4]


def test_words_that_do_not_fit_are_counted(bert: Tokens, byte_tokens: Tokens) -> None:
    names = ("O", "B-x", "I-x")
    arrays = tag_arrays(Tagged([["a", "bcd", "e"]], [["O", "B-x", "O"]]), names, bert, 5)
    assert row(arrays, 0) == [2, 4, 3]  # bcd has three pieces and would not be whole; words after it are not read
    assert arrays["cut"].tolist() == [2]
    arrays = tag_arrays(Tagged([["ab"]], [["B-x"]]), names, byte_tokens, 1)
    assert row(arrays, 0) == [256]
    assert row(arrays, 0, "tags") == [IGNORED]


def test_gpt_words_are_tokenised_with_their_space(byte_tokens: Tokens) -> None:
    arrays = tag_arrays(Tagged([["ab", "c"]], [["O", "O"]]), ("O", "B-x", "I-x"), byte_tokens, 16)
    assert row(arrays, 0) == list(b"ab c")
    assert row(arrays, 0, "tags") == [0, IGNORED, 0, IGNORED]


def long_question(words: int, answer_word: int) -> Question:
    context = " ".join(f"{LETTERS[n % 8]}{LETTERS[n // 8 % 8]}." for n in range(words))
    start = len(" ".join(context.split()[:answer_word])) + (answer_word > 0)
    answer = context.split()[answer_word]
    (made,) = questions(
        [{"context": context, "question": "a b", "answers": {"text": [answer], "answer_start": [start]}}], "x"
    )
    return made


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 120), st.data(), st.integers(83, 200), st.booleans())
def test_windows_cover_the_context_and_the_answer_reads_back(
    bert: Tokens, byte_tokens: Tokens, words: int, data: st.DataObject, context: int, framed: bool
) -> None:
    tokens = bert if framed else byte_tokens
    question = long_question(words, data.draw(st.integers(0, words - 1)))
    arrays = qa_arrays([question], tokens, context, train=False)
    covered = np.zeros(len(question.context), dtype=bool)
    inside = 0
    for number in range(len(arrays["question"])):
        ids = row(arrays, number)
        assert len(ids) <= context
        begins, ends = row(arrays, number, "from"), row(arrays, number, "to")
        for begin, end in zip(begins, ends, strict=True):
            if begin >= 0:
                covered[begin:end] = True
        start, end = int(arrays["start"][number]), int(arrays["end"][number])
        if start != IGNORED:
            inside += 1
            assert question.context[begins[start] : ends[end]].strip() == question.answers[0]
    assert covered[[place for place, letter in enumerate(question.context) if letter != " "]].all()
    trained = qa_arrays([question], tokens, context, train=True)
    assert len(trained["question"]) == inside
    assert inside >= 1 or words > 20  # an answer may lie across the edge of windows only if there are edges
    assert texts_of(arrays, "contexts", [0]) == [question.context]
    assert texts_of(arrays, "answers", range(1)) == list(question.answers)


def test_neighbours_of_an_answer_are_not_in_it(byte_tokens: Tokens) -> None:
    question = Question("k", "g", "a (cat) b", "?", ("cat",), (3,))
    arrays = qa_arrays([question], byte_tokens, 100, train=True)
    assert bytes(row(arrays, 0)[arrays["start"][0] : arrays["end"][0] + 1]) == b"cat"


def test_short_answers_are_whole_in_some_window(bert: Tokens) -> None:
    for word in range(0, 150, 7):
        question = long_question(150, word)
        assert len(qa_arrays([question], bert, 90, train=True)["question"]) >= 1


def test_a_long_question_is_cut(bert: Tokens) -> None:
    question = Question("k", "g", "cat sat", "a " * 100, ("cat",), (0,))
    arrays = qa_arrays([question], bert, 128, train=True)
    assert arrays["cut"].tolist() == [36]
    assert row(arrays, 0) == [2, *[4] * 64, 3, 21, 22, 3]
    assert arrays["second"].tolist() == [66]


def test_a_context_without_room_is_refused(bert: Tokens) -> None:
    with pytest.raises(ConfigError, match="context = 4 is too short for this task: use at least 5 tokens"):
        classify_arrays(Labelled(["a"], ["b"], [0]), bert, 4)
    with pytest.raises(ConfigError, match="context = 64 is too short for this task: use at least 83 tokens"):
        qa_arrays([long_question(3, 1)], bert, 64, train=True)


def test_large_vocabularies_get_wider_ids(bert: Tokens) -> None:
    arrays = classify_arrays(Labelled(["a"], None, [0]), bert, 8)
    assert arrays["ids"].dtype == np.uint16
    wide = Tokens(**{**bert.__dict__, "vocab_size": 2**16 + 1})
    assert classify_arrays(Labelled(["a"], None, [0]), wide, 8)["ids"].dtype == np.uint32


def test_progress_is_told_to_the_end(bert: Tokens) -> None:
    told: list[tuple[int, int]] = []
    classify_arrays(Labelled(["a"] * 3000, None, [0] * 3000), bert, 8, lambda done, total: told.append((done, total)))
    assert told == [(2048, 3000), (3000, 3000)]
    assert json.dumps(told)
