"""Prepared tasks: batches hold what was prepared, scores read it back, the file is whole or refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.data import prepared
from oelm.data.examples import IGNORED, Arrays, classify_arrays, qa_arrays, tag_arrays
from oelm.data.prepared import Prepared, load, save
from oelm.data.scores import entity_scores
from oelm.data.tables import Labelled, Tagged, questions
from oelm.data.tokens import load_tokens
from oelm.errors import DataError, MachineError


NAMES = ("O", "B-x", "I-x")


def meta(kind: str, labels: tuple[str, ...], context: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": "made",
        "fingerprint": "0" * 64,
        "settings": {"selection": "validation"},
        "vocab_size": 257,
        "pad_id": 256,
        "labels": list(labels),
        "context": context,
        "provenance": {"status": "synthetic"},
        "overlap": {},
        "samples": {},
    }


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abc d"), size=rng.integers(1, 40))) for _ in range(count)]


@pytest.fixture
def classes() -> Prepared:
    tokens = load_tokens("bytes")

    def arrays(count: int, seed: int) -> Arrays:
        numbers = np.random.default_rng(seed).integers(0, 3, count).tolist()
        return classify_arrays(Labelled(texts(count, seed), None, numbers), tokens, 32)

    splits = {"train": arrays(100, 1), "validation": arrays(30, 2), "test": arrays(31, 3)}
    return Prepared(splits, meta("classify", ("a", "b", "c"), 32))


@pytest.fixture
def tags() -> Prepared:
    tokens = load_tokens("bytes")
    rng = np.random.default_rng(0)
    words = [text.split() or ["a"] for text in texts(40, 4)]
    given = [[NAMES[n] for n in rng.integers(0, 3, len(sentence))] for sentence in words]
    arrays = tag_arrays(Tagged(words, given), NAMES, tokens, 16)
    return Prepared({"train": arrays, "validation": arrays}, meta("tag", NAMES, 16))


QA_ROWS = [
    {"context": "The cat sat on the mat. " * 8 + "Anna came home late.", "question": "Who came?", "answers": ["Anna"]},
    {"context": "Bees make honey.", "question": "What do bees make?", "answers": ["honey", "make honey"]},
    {"context": "Bees make honey.", "question": "Who makes honey?", "answers": ["Bees"]},
]


@pytest.fixture
def answers() -> Prepared:
    tokens = load_tokens("bytes")
    examples = questions(QA_ROWS, "x")
    splits = {
        "train": qa_arrays(examples, tokens, 100, train=True),
        "validation": qa_arrays(examples, tokens, 100, train=False),
    }
    return Prepared(splits, meta("qa", (), 100))


def test_a_batch_holds_the_examples_it_names(classes: Prepared) -> None:
    arrays = classes.splits["train"]
    for step in range(classes.steps_per_epoch(7)):
        batch = classes.train_batch(seed=3, step=step, batch=7)
        assert {name: array.shape for name, array in batch.items()} == {
            "inputs": (7, batch["inputs"].shape[1]),
            "mask": (7, batch["inputs"].shape[1]),
            "types": (7, batch["inputs"].shape[1]),
            "last": (7,),
            "labels": (7,),
            "index": (7,),
        }
        assert batch["inputs"].shape[1] % 8 == 0
        for place, row in enumerate(batch["index"]):
            ids = arrays["ids"][arrays["offsets"][row] : arrays["offsets"][row + 1]].tolist()
            assert batch["inputs"][place][batch["mask"][place]].tolist() == ids
            assert batch["last"][place] == len(ids) - 1
            assert (batch["inputs"][place][~batch["mask"][place]] == 256).all()
            assert batch["labels"][place] == arrays["labels"][row]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_and_restarts_see_the_same_batches(classes: Prepared, world: int) -> None:
    again = Prepared(classes.splits, classes.meta)
    for step in (5, 0, 40):
        whole = classes.train_batch(seed=1, step=step, batch=8)
        parts = [again.train_batch(seed=1, step=step, batch=8, rank=rank, world=world) for rank in range(world)]
        for name, array in whole.items():
            assert np.array_equal(array, np.concatenate([one[name] for one in parts]))


def test_a_fixed_width(classes: Prepared) -> None:
    assert classes.train_batch(seed=0, step=0, batch=8, pad_to=32)["inputs"].shape == (8, 32)
    assert {batch["inputs"].shape[1] for batch in classes.eval_batches("test", 8, pad_to=32)} == {32}


def test_evaluation_covers_the_split_once(classes: Prepared) -> None:
    read = np.concatenate([batch["index"] for batch in classes.eval_batches("test", 8)])
    assert sorted(read.tolist()) == list(range(31))
    with pytest.raises(DataError, match="made has no 'dev' split"):
        next(classes.eval_batches("dev", 8))


def test_the_originals_protocol_reads_test_as_validation(classes: Prepared) -> None:
    leaky = Prepared(classes.splits, classes.meta | {"settings": {"selection": "test"}})
    assert sum(len(batch["index"]) for batch in leaky.eval_batches("validation", 8)) == 31
    assert sum(len(batch["index"]) for batch in classes.eval_batches("validation", 8)) == 30


def test_class_scores(classes: Prepared) -> None:
    outputs, logits = [], []
    for batch in classes.eval_batches("test", 8):
        said = (batch["labels"] + (batch["index"] % 4 == 0)) % 3
        outputs.append((batch["index"], said))
        logits.append((batch["index"], np.eye(3)[said]))
    scored = classes.score("test", outputs, per_example=True)
    assert scored["accuracy"] == pytest.approx(1 - 8 / 31)
    assert scored["examples"] == 31
    assert scored["per_example"] == {row: int(row % 4 != 0) for row in range(31)}
    assert classes.score("test", logits)["accuracy"] == scored["accuracy"]
    with pytest.raises(DataError, match="2 predictions for 1 examples"):
        classes.score("test", [([0], [1, 2])])
    with pytest.raises(DataError, match="example 31 is not in test, which has 31"):
        classes.score("test", [([31], [1])])
    with pytest.raises(DataError, match="no prediction to score"):
        classes.score("test", [])


def test_tag_scores_count_every_word(tags: Prepared) -> None:
    arrays = tags.splits["validation"]
    assert arrays["cut"].sum() > 0  # some words do not fit: the score still counts them
    perfect, truth, read = [], [], []
    for batch in tags.eval_batches("validation", 8):
        perfect.append((batch["index"], np.where(batch["labels"] == IGNORED, 2, batch["labels"])))
        for row, line in zip(batch["index"], batch["labels"], strict=True):
            wanted = [NAMES[n] for n in arrays["truth"][arrays["words"][row] : arrays["words"][row + 1]]]
            kept = [NAMES[n] for n in line[line != IGNORED]]
            truth.append(wanted)
            read.append(kept + ["O"] * (len(wanted) - len(kept)))
    scored = tags.score("validation", perfect)
    assert {name: scored[name] for name in ("f1", "precision", "recall", "accuracy")} == entity_scores(truth, read)
    assert 0 < scored["f1"] < 1


def test_perfect_logits_answer_every_question(answers: Prepared) -> None:
    outputs = []
    for batch in answers.eval_batches("validation", 2):
        start, end = (np.where(batch["mask"], 0.0, -np.inf) for _ in range(2))
        for place in range(len(batch["index"])):
            if batch["start"][place] != IGNORED:
                start[place, batch["start"][place]] = 9.0
                end[place, batch["end"][place]] = 9.0
        outputs.append((batch["index"], start, end))
    scored = answers.score("validation", outputs, per_example=True)
    assert scored["exact_match"] == 1.0
    assert scored["f1"] == 1.0
    assert scored["examples"] == 3
    assert scored["answers"] == {"0": "Anna", "1": "honey", "2": "Bees"}
    pairs = answers.score("validation", [(index, (start, end)) for index, start, end in outputs])
    assert pairs["f1"] == 1.0


def test_an_answer_lies_in_the_context_and_ends_after_it_starts(answers: Prepared) -> None:
    (batch,) = answers.eval_batches("validation", 64)
    rows = len(batch["index"])
    start, end = np.zeros((2, rows, batch["inputs"].shape[1]))
    start[:, 0] = end[:, 1] = 99.0  # the question is no answer
    for place, row in enumerate(batch["index"]):
        question = answers.splits["validation"]["question"][row]
        if question == 1:
            first = len("What do bees make?") + 1
            start[place, first + 10] = 9.0  # "honey"
            end[place, first + 3] = 8.0  # would end before it starts
            end[place, first + 14] = 7.0
    scored = answers.score("validation", [(batch["index"], start, end)], per_example=True)
    assert scored["answers"]["1"] == "honey"


def test_training_windows_hold_their_answer(answers: Prepared) -> None:
    batch = answers.train_batch(seed=0, step=0, batch=4)
    assert (batch["start"] >= 0).all()
    for place in range(4):
        ids = batch["inputs"][place][batch["start"][place] : batch["end"][place] + 1]
        assert bytes(ids.tolist()).decode().strip() in {"Anna", "honey", "Bees"}


@pytest.mark.parametrize("compressed", [False, True])
def test_the_file_keeps_everything(classes: Prepared, tmp_path: Path, compressed: bool) -> None:
    path = save(classes, tmp_path / "deep" / "a.task.npz", compressed=compressed)
    again = load(path)
    assert again.fingerprint == classes.fingerprint
    assert again.provenance == classes.provenance
    one, other = (source.train_batch(seed=1, step=2, batch=8) for source in (classes, again))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    first = path.read_bytes()
    save(classes, path, compressed=compressed)
    assert path.read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == ["a.task.npz"]


def test_any_flipped_byte_is_refused(classes: Prepared, tmp_path: Path) -> None:
    path = save(classes, tmp_path / "a.task.npz")
    whole = path.read_bytes()
    reference = {name: array.tobytes() for name, array in load(path).splits["train"].items()}
    refused = 0
    for place in np.random.default_rng(0).integers(0, len(whole), 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            found = load(path)
        except DataError:
            refused += 1
        else:  # a byte of the archive that says nothing, such as a date
            assert {name: array.tobytes() for name, array in found.splits["train"].items()} == reference
    assert refused > 50


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive", b"\x93NUMPY" + bytes(80)])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.task.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.task\.npz: is (damaged|not)"):
        load(path)
    with pytest.raises(DataError, match="no such prepared task"):
        load(tmp_path / "b.npz")


def test_other_archives_and_altered_arrays_are_refused(classes: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "a.task.npz"
    np.savez(path, weights=np.zeros(3))
    with pytest.raises(DataError, match="is not a prepared task of OELM"):
        load(path)
    np.savez(path, meta=np.frombuffer(json.dumps({"format": "other"}).encode(), dtype=np.uint8))
    with pytest.raises(DataError, match="not a prepared task of this version"):
        load(path)
    save(classes, path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays["train/labels"] = 1 - arrays["train/labels"]
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="train/labels is not what was written"):
        load(path)
    del arrays["train/labels"]
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="lacks arrays"):
        load(path)


@pytest.mark.parametrize(
    ("split", "name", "value", "said"),
    [
        ("train", "ids", 257, "tokens beyond the vocabulary"),
        ("test", "labels", 3, "labels beyond 3"),
        ("test", "labels", -1, "labels beyond 3"),
        ("train", "offsets", 10**6, "rows do not add up"),
    ],
)
def test_arrays_that_make_no_sense_are_refused(
    classes: Prepared, tmp_path: Path, split: str, name: str, value: int, said: str
) -> None:
    classes.splits[split][name] = classes.splits[split][name].copy()
    classes.splits[split][name][5] = value
    with pytest.raises(DataError, match=said):
        load(save(classes, tmp_path / "a.task.npz"))


def test_missing_arrays_and_other_kinds_are_refused(classes: Prepared, tags: Prepared, tmp_path: Path) -> None:
    del classes.splits["train"]["second"]
    with pytest.raises(DataError, match="is not whole"):
        load(save(classes, tmp_path / "a.task.npz"))
    tags.meta["kind"] = "guess"
    with pytest.raises(DataError, match="is not whole"):
        load(save(tags, tmp_path / "a.task.npz"))
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(DataError, match="one array, not an archive"):
        load(tmp_path / "b.npy")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "a.task.npz"
    np.savez(path, meta=np.array([{"format": prepared.FORMAT}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="damaged or no prepared task"):
        load(path)
    assert zipfile.is_zipfile(path)


def test_a_full_disk_leaves_nothing_behind(classes: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepared.os, "fsync", full)
    with pytest.raises(MachineError, match="No space left on device"):
        save(classes, tmp_path / "a.task.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_folder_is_said(classes: Prepared, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="cannot be written"):
        save(classes, tmp_path / "file" / "a.task.npz")
