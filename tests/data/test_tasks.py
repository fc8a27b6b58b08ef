"""Tasks end to end: files of the user's, named sets in folders, the real sets where they are, and every refusal."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oelm.data import disk, overlap, sources, tasks
from oelm.data.open import load
from oelm.data.prepared import Prepared
from oelm.data.recall import RecallSource
from oelm.data.spec import DataSpec
from oelm.data.store import stores_folders
from oelm.data.task_table import HUB_ORDER, TASKS
from oelm.errors import BusyError, ConfigError, DataError, MachineError


SHARED = sources.shared_folder()
real = pytest.mark.skipif(SHARED is None, reason="../shared/data is not here: the real sets are not read")


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without hub, with its own place for prepared data."""
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("OELM_HOME", str(path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(path / "hf"))
    monkeypatch.delenv("OELM_DATA", raising=False)
    return path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shared folder either."""
    monkeypatch.setattr(sources, "shared_folder", lambda: None)


def reviews(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    words = ["film", "plot", "good", "bad", "long", "actor", "scene", "music"]
    rows = []
    for number in range(count):
        label = int(rng.integers(0, 2))
        text = " ".join(rng.choice(words, size=rng.integers(2, 9)))
        rows.append({"text": f"{text} {number}" + ', "said"' * (number % 5 == 0), "label": label})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def local(path: Path, task: str = "classify", **more: Any) -> DataSpec:
    known = {"name": "local", "path": str(path), "task": task, "tokenizer": "bytes", "context": 64}
    return DataSpec.model_validate(known | more)


def opened(spec: DataSpec, **more: Any) -> Prepared:
    source = tasks.open_task(spec, **more)
    assert isinstance(source, Prepared)
    return source


def read_back(source: Prepared, split: str) -> set[tuple[str, int]]:
    """The texts and labels of a split out of its batches, bytes decoded by hand."""
    found = set()
    for batch in source.eval_batches(split, 16):
        for ids, mask, label in zip(batch["inputs"], batch["mask"], batch["labels"], strict=True):
            found.add((bytes(ids[mask].tolist()).decode(), int(label)))
    return found


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_users_file_is_read_exactly(tmp_path: Path, suffix: str) -> None:
    rows = reviews(200)
    source = opened(local(write(tmp_path / f"data{suffix}", rows)))
    parts = {split: read_back(source, split) for split in ("train", "validation", "test")}
    assert set.union(*parts.values()) == {(row["text"], row["label"]) for row in rows}
    assert sum(map(len, parts.values())) == 200
    assert source.labels == ("0", "1")
    assert source.provenance["counts"] == {split: len(part) for split, part in parts.items()}
    assert source.provenance["status"] == "real"
    assert "carved from train by hash" in source.provenance["note"]


@pytest.mark.parametrize("names", [(1, 2, 3, 4), (5, 10), (-1, 1), (2, 10, "abc"), (True, False), ("1", "2")])
def test_a_users_labels_may_be_any_numbers(tmp_path: Path, names: tuple[Any, ...]) -> None:
    rows = [{"text": f"text {n}", "label": names[n % len(names)]} for n in range(60)]
    source = opened(local(write(tmp_path / "data.jsonl", rows)))
    for split in ("train", "validation", "test"):
        for text, number in read_back(source, split):
            given = names[int(text.split()[1]) % len(names)]
            assert source.labels[number] == str(int(given) if isinstance(given, bool) else given)


def test_a_users_folder_keeps_its_splits(tmp_path: Path) -> None:
    rows = reviews(90)
    for split, part in (("train", rows[:60]), ("dev", rows[60:75]), ("test", rows[75:])):
        write(tmp_path / "mine" / f"{split}.csv", part)
    source = opened(local(tmp_path / "mine"))
    assert read_back(source, "validation") == {(row["text"], row["label"]) for row in rows[60:75]}
    assert read_back(source, "test") == {(row["text"], row["label"]) for row in rows[75:]}
    assert source.train_size == 60


def test_named_columns_pairs_and_labels_by_name(tmp_path: Path) -> None:
    rows = [{"one": f"a{n}", "two": f"b{n}", "gold": ["yes", "no"][n % 2], "text": "not this"} for n in range(40)]
    spec = local(
        write(tmp_path / "pairs.jsonl", rows), columns={"text": "one", "text2": "two", "label": "gold"}, context=16
    )
    source = opened(spec)
    assert source.labels == ("no", "yes")
    plain = [{"text": row["one"], "text2": row["two"], "label": row["gold"]} for row in rows]
    unnamed = opened(local(write(tmp_path / "plain.csv", plain), context=16))
    for split in ("train", "validation", "test"):
        assert unnamed.splits[split]["ids"].tolist() == source.splits[split]["ids"].tolist()
    batch = source.train_batch(seed=0, step=0, batch=4)
    for ids, mask, label in zip(batch["inputs"], batch["mask"], batch["labels"], strict=True):
        first, second = bytes(i if i < 256 else 0 for i in ids[mask].tolist()).split(b"\x00")
        assert first[1:] == second[1:]
        assert label == 1 - int(first[1:]) % 2


def test_tagging_and_reading_out_of_a_users_files(tmp_path: Path) -> None:
    tagged = [{"tokens": ["Anna", f"n{n}"], "tags": ["B-per", "O"]} for n in range(30)]
    source = opened(local(write(tmp_path / "tags.jsonl", tagged), "tag"))
    assert source.kind == "tag"
    assert source.labels == ("O", "B-per", "I-per")
    asked = [
        {
            "context": f"Town {n} has a tower.",
            "question": "What has it?",
            "answers": {"text": ["tower"], "answer_start": [len(f"Town {n} has a ")]},
        }
        for n in range(30)
    ]
    source = opened(local(write(tmp_path / "qa.parquet", asked), "qa", context=128))
    batch = source.train_batch(seed=0, step=0, batch=2)
    assert bytes(batch["inputs"][0][batch["start"][0] : batch["end"][0] + 1].tolist()) == b" tower"[1:]


def test_a_second_start_reads_the_kept_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = local(write(tmp_path / "data.csv", reviews(60)))
    first = opened(spec)
    monkeypatch.setattr(tasks, "classify_arrays", None)  # tokenising again would fail
    again = opened(spec)
    assert again.fingerprint == first.fingerprint
    one, other = (source.train_batch(seed=1, step=3, batch=8) for source in (first, again))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_fingerprints_follow_text_settings_and_tokenizer(tmp_path: Path) -> None:
    rows = reviews(60)
    path = write(tmp_path / "data.csv", rows)
    spec = local(path)
    prints = {opened(spec).fingerprint}
    for other in (
        spec.changed(context=32),
        spec.changed(seed=1),
        spec.changed(examples=10),
        spec.changed(tokenizer="demo-bpe"),
    ):
        prints.add(opened(other).fingerprint)
    assert opened(spec.changed(bucketing=False)).fingerprint in prints
    write(path, [*rows[:-1], rows[-1] | {"label": 1 - rows[-1]["label"]}])
    changed = opened(spec)
    prints.add(changed.fingerprint)
    assert len(prints) == 6
    assert (rows[-1]["text"], 1 - rows[-1]["label"]) in set.union(
        *(read_back(changed, split) for split in ("train", "validation", "test"))
    )


def test_a_damaged_kept_file_is_made_again(tmp_path: Path) -> None:
    spec = local(write(tmp_path / "data.csv", reviews(60)))
    first = opened(spec)
    kept = stores_folders()[0] / tasks.task_file(spec)
    kept.write_bytes(kept.read_bytes()[:-100])
    assert opened(spec).fingerprint == first.fingerprint
    assert opened(spec).train_size == first.train_size


def test_near_equal_texts_stay_on_one_side(tmp_path: Path) -> None:
    rows = []
    for number in range(100):
        rows += [
            {"text": f"Text {number}!", "label": number % 2},
            {"text": f"text  <br />{number}", "label": number % 2},
        ]
    source = opened(local(write(tmp_path / "data.csv", rows)))
    sides: dict[str, set[str]] = {}
    for split in ("train", "validation", "test"):
        for text, _ in read_back(source, split):
            sides.setdefault(overlap.normal_form(text), set()).add(split)
    assert len(sides) == 100
    assert all(len(found) == 1 for found in sides.values())
    between = tasks.describe(source)["overlap"]["between"]
    assert all(count == 0 for pair in between.values() for count in pair.values())


def test_examples_are_chosen_by_the_seed_not_by_place(tmp_path: Path) -> None:
    rows = sorted(reviews(300), key=lambda row: row["label"])
    spec = local(write(tmp_path / "data.csv", rows), examples=40)
    source = opened(spec)
    assert source.train_size == 40
    assert {label for _, label in read_back(source, "train")} == {0, 1}
    assert "train is limited to 40 examples" in source.provenance["note"]
    assert read_back(source, "validation") == read_back(opened(spec.changed(examples=None)), "validation")


def trec_rows(count: int, column: str, order: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"text": f"{order[n % 6]} question {n}", column: n % 6} for n in range(count)]


def test_the_hubs_order_of_labels_is_translated(tmp_path: Path, alone: None) -> None:
    """The hub numbers TREC's classes ABBR, ENTY, DESC ...; ours, as the shared files, ABBR, DESC, ENTY ..."""
    for split, count in (("train", 120), ("test", 30)):
        write(tmp_path / "trec" / f"{split}.parquet", trec_rows(count, "coarse_label", HUB_ORDER["trec"]))
    spec = DataSpec(name="trec", tokenizer="bytes", context=64)
    source = opened(spec, folder=tmp_path)
    for split in ("train", "validation", "test"):
        for text, label in read_back(source, split):
            assert text.split()[0] == source.labels[label]
    assert source.provenance["status"] == "partial"
    assert "train has 120 of the official 5,452 rows" in source.provenance["note"]


def test_the_originals_protocol_is_marked(tmp_path: Path, alone: None) -> None:
    for split, count in (("train", 60), ("test", 18)):
        write(tmp_path / "trec" / f"{split}.parquet", trec_rows(count, "label", TASKS["trec"].labels))
    spec = DataSpec(name="trec", tokenizer="bytes", context=64, selection="test")
    source = opened(spec, folder=tmp_path)
    assert source.train_size == 60  # nothing is carved
    assert read_back(source, "validation") == read_back(source, "test")
    assert source.provenance["selection"] == "test"
    assert "validation reads the test split" in source.provenance["note"]


def test_rows_without_a_gold_label_are_left_out_and_said(tmp_path: Path, alone: None) -> None:
    rows = [{"premise": f"p{n}", "hypothesis": "h", "label": n % 4 - 1} for n in range(80)]
    for split in ("train", "validation", "test"):
        write(tmp_path / "snli" / f"{split}.parquet", rows)
    source = opened(DataSpec(name="snli", tokenizer="bytes", context=64), folder=tmp_path)
    assert source.train_size == 60
    assert "20 rows of train" in source.provenance["note"]
    leaky = opened(DataSpec(name="snli", tokenizer="bytes", context=64, selection="test"), folder=tmp_path)
    assert set(leaky.splits) == {"train", "test"}
    write(tmp_path / "mnli" / "train.parquet", rows)
    write(tmp_path / "mnli" / "test.parquet", rows)
    with pytest.raises(DataError, match=r"train\.parquet, row 1: label -1 is not known"):
        opened(DataSpec(name="mnli", tokenizer="bytes", context=64), folder=tmp_path)


def test_pairs_of_one_premise_stay_together(tmp_path: Path, alone: None) -> None:
    rows = [{"premise": f"premise {n // 3}", "hypothesis": f"h{n}", "label": n % 3} for n in range(300)]
    for split in ("train", "test"):
        write(tmp_path / "mnli" / f"{split}.parquet", rows)
    source = opened(DataSpec(name="mnli", tokenizer="bytes", context=64), folder=tmp_path)
    premises = {}
    for split in ("train", "validation"):
        found = set()
        for batch in source.eval_batches(split, 8):
            for ids, mask in zip(batch["inputs"], batch["mask"], strict=True):
                found.add(tuple(ids[mask].tolist())[: ids.tolist().index(256)])
        premises[split] = found
    assert not premises["train"] & premises["validation"]
    assert premises["validation"]


def test_a_packed_task_needs_neither_text_nor_tokenizer(
    tmp_path: Path, alone: None, monkeypatch: Any, home: Path
) -> None:
    for split, count in (("train", 60), ("test", 18)):
        write(tmp_path / "trec" / f"{split}.parquet", trec_rows(count, "coarse_label", HUB_ORDER["trec"]))
    spec = DataSpec(name="trec", tokenizer="bytes", context=64)
    source = opened(spec, folder=tmp_path)
    path = tasks.pack(source, tmp_path / "parcel", spec)
    assert path.stat().st_size < (stores_folders()[0] / path.name).stat().st_size
    other = home / "other"
    monkeypatch.setenv("OELM_HOME", str(other))
    with pytest.raises(DataError, match="'trec' is not on this machine and the hub is switched off"):
        tasks.open_task(spec)
    (other / "stores").mkdir(parents=True)
    os.replace(path, other / "stores" / path.name)
    carried = opened(spec)
    assert carried.fingerprint == source.fingerprint
    assert carried.provenance == source.provenance
    assert opened(spec.changed(bucketing=False)).fingerprint == source.fingerprint
    assert tasks.unpack(other / "stores", spec).fingerprint == source.fingerprint
    with pytest.raises(DataError, match="'trec' is not on this machine"):
        tasks.open_task(spec.changed(context=32))  # other settings are another task


def test_nothing_local_names_the_layout_that_is_expected(tmp_path: Path, alone: None) -> None:
    with pytest.raises(DataError, match=r"imdb/\{train,test\}\.parquet"):
        tasks.open_task(DataSpec(name="imdb", tokenizer="bytes"))
    with pytest.raises(DataError, match=r"has no data set 'squad'; expected .*squad/"):
        tasks.open_task(DataSpec(name="squad", tokenizer="bytes"), folder=tmp_path)


def test_describe_is_plain_data(tmp_path: Path) -> None:
    rows = [*reviews(80), reviews(80)[0]]
    source = opened(local(write(tmp_path / "data.csv", rows), context=24))
    told = tasks.describe(source)
    assert json.loads(json.dumps(told)) == told
    assert sum(part["examples"] for part in told["splits"].values()) == 81
    assert sum(sum(part["labels"].values()) for part in told["splits"].values()) == 81
    within = [part["exact"] for part in told["overlap"]["within"].values()]
    assert sum(within) == 1
    long = [row for row in rows if len(row["text"]) > 24]
    cut = [part["truncated"] for part in told["splits"].values()]
    assert sum(part["examples"] for part in cut) == len(long) > 0
    assert sum(part["tokens"] for part in cut) == sum(len(row["text"]) - 24 for row in long)
    assert told["splits"]["train"]["lengths"]["max"] <= 24
    assert 0 <= told["waste"]["16"] < 1
    assert told["samples"]["train"][0] in {row["text"] for row in rows}


def test_recall_through_the_same_door() -> None:
    source = tasks.open_task(DataSpec(name="recall", context=64, pairs=4, symbols=32))
    assert isinstance(source, RecallSource)
    assert (
        tasks.prepare_task(DataSpec(name="recall", context=64, pairs=4, symbols=32)).fingerprint == source.fingerprint
    )
    told = tasks.describe(source)
    assert json.loads(json.dumps(told)) == told


BAD_FILES = {
    "empty.csv": (b"", "is empty"),
    "header.csv": (b"text,label\n", "holds no rows"),
    "renamed.csv": (b"txt,label\na,1\n", "has no column 'text'.*did you mean 'txt'"),
    "ragged.csv": (b"text,label\na,1\nb,0,extra\n", "line 3: has another number of fields"),
    "quote.csv": (b'text,label\n"a,1\nb,0\n', "is not CSV"),
    "utf16.csv": ("text,label\na,1\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
    "latin.csv": (b"text,label\ncaf\xe9,1\n", "is not UTF-8"),
    "nul.csv": (b"text,label\na\x00b,1\n", "NUL"),
    "label.csv": (b"text,label\na,1\nb,\n", "row 2: label '' is neither a name nor a whole number"),
    "one.csv": (b"text,label\na,1\nb,1\n", "has 1 different label"),
    "few.csv": (b"text,label\na,1\nb,0\n", "has 2 different texts, too few"),
    "broken.jsonl": (b'{"text": "a", "label": 1}\n{"text": \n', "line 2: is not JSON"),
    "list.jsonl": (b"[1, 2]\n", "line 1: is a list"),
    "missing.jsonl": (b'{"text": "a", "label": 1}\n{"text": "b"}\n', "line 2.*has no column 'label'"),
    "type.jsonl": (
        b'{"text": 5, "label": 1}\n{"text": "b", "label": 0}\n{"text": "c", "label": 0}\n',
        "row 1: text is 5",
    ),
    "cut.parquet": (b"PAR1" + bytes(50), "is not a whole Parquet file"),
    "what.xlsx": (b"PK\x03\x04", "cannot be read as data"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_one_line_and_leave_nothing(tmp_path: Path, name: str, home: Path) -> None:
    content, said = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        tasks.open_task(local(tmp_path / name))
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert not [path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock")]


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "data.csv", reviews(60))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert opened(local(path)).train_size > 30


def test_labels_of_test_that_train_has_not_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.csv", reviews(30))
    write(tmp_path / "d" / "test.csv", [{"text": "new", "label": 1}, {"text": "newer", "label": 2}])
    with pytest.raises(
        DataError, match=r"test\.csv, row 2: label '2' is not known; allowed: those of train, known: 0, 1"
    ):
        tasks.open_task(local(tmp_path / "d"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"columns": {"txt": "a"}}, "data.columns: 'txt' is no column of a classify task; did you mean 'text'"),
        ({"task": "recall"}, "data.task = 'recall' is no task with labels"),
        ({"tokens": 1000}, "data.tokens: local is read in examples; use examples"),
        ({"packing": "documents"}, "data.packing: local is read in examples"),
        ({"path": "/nowhere/at/all.csv"}, "/nowhere/at/all.csv: no such file"),
    ],
)
def test_specs_that_make_no_sense(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    spec = local(write(tmp_path / "data.csv", reviews(9)))
    with pytest.raises((ConfigError, DataError), match=said):
        tasks.open_task(spec.changed(**more))


def test_every_row_is_complete() -> None:
    for name, row in TASKS.items():
        assert row.name == name
        assert row.licence
        assert row.title
        assert row.official
        assert row.kind == "qa" or len(set(row.labels)) == len(row.labels) >= 2
        assert row.hub is not None
        assert row.hub.id.count("/") == 1  # bare names were script data sets
        assert row.hub.revision in (None, "refs/convert/parquet")
        assert row.hub.revision is None or row.hub.config is None  # that revision has no card to name one


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'imdb'"):
        tasks.open_task(DataSpec(name="imbd"))


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = local(write(tmp_path / "data.csv", reviews(60)))
    (home / "file").write_text("in the way")
    monkeypatch.setenv("OELM_HOME", str(home / "file"))
    with pytest.raises(MachineError, match=r"cannot be written .*OELM_HOME"):
        tasks.open_task(spec)


def _on_the_hub(monkeypatch: pytest.MonkeyPatch, **rows: dict[str, Any]) -> None:
    """Data sets of the hub, as `datasets` gives them: {name of ours: {split: Dataset}}."""

    def find(dataset: sources.DataSet, folder: object = None) -> sources.HubFound:
        assert dataset.hub is not None
        loaded = rows[dataset.hub.id.split("/")[1].replace("-", "_").lower()]
        return sources.HubFound(dataset=dataset, place="hub", hub=dataset.hub, loaded=loaded)

    monkeypatch.setattr(sources, "find", find)
    monkeypatch.setattr(sources, "find_hub", find)


def test_tables_of_the_hub(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    datasets = pytest.importorskip("datasets")
    tags = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "ner_tags": datasets.List(datasets.ClassLabel(names=list(TASKS["wnut17"].labels))),
        }
    )
    wnut = datasets.Dataset.from_list([{"tokens": ["a", "Rome"], "ner_tags": ["O", "B-location"]}] * 9, features=tags)
    answers = {"text": ["Rome", "Rome"], "answer_start": [3, 9]}
    asked = [
        {"id": f"q{n}", "title": f"t{n}", "context": f"In Rome. Rome {n}", "question": "?", "answers": answers}
        for n in range(40)
    ]
    squad = datasets.Dataset.from_list(asked)
    phrases = datasets.Dataset.from_list([{"sentence": f"s {n}", "label": n % 2, "idx": n} for n in range(40)])
    whole = datasets.Dataset.from_list([{"text": f"w {n}", "label": n % 2, "label_text": "x"} for n in range(12)])
    _on_the_hub(
        monkeypatch,
        wnut_17={"train": wnut, "validation": wnut, "test": wnut},
        squad={"train": squad, "test": squad},
        glue={"train": phrases, "validation": phrases},
        sst2={"test": whole},
    )
    source = opened(DataSpec(name="wnut17", tokenizer="bytes", context=32))
    labels = source.train_batch(seed=0, step=0, batch=1)["labels"]
    assert [source.labels[n] for n in labels[labels >= 0]] == ["O", "B-location"]
    source = opened(DataSpec(name="squad", tokenizer="bytes", context=96))
    batch = source.train_batch(seed=0, step=0, batch=1)
    assert bytes(batch["inputs"][0][batch["start"][0] : batch["end"][0] + 1].tolist()) == b"Rome"
    assert source.provenance["status"] == "partial"
    source = opened(DataSpec(name="sst2", tokenizer="bytes", context=32))
    assert source.provenance["counts"] == {"train": 40, "validation": 40, "test": 12}


def test_files_of_the_hub_under_our_paths(tmp_path: Path, alone: None) -> None:
    numbers = [{"tokens": ["a", "Rome"], "ner_tags": [0, 7]}] * 20
    for split in ("train", "validation", "test"):
        write(tmp_path / "wnut17" / f"{split}.parquet", numbers)
    source = opened(DataSpec(name="wnut17", tokenizer="bytes", context=32), folder=tmp_path)
    labels = source.train_batch(seed=0, step=0, batch=1)["labels"]
    assert [source.labels[n] for n in labels[labels >= 0]] == ["O", "B-location"]


def _prepare(spec: DataSpec, sent: Any) -> None:
    sent.put(tasks.open_task(spec).fingerprint)


def test_two_processes_prepare_the_same_task(tmp_path: Path) -> None:
    spec = local(write(tmp_path / "data.csv", reviews(3000)))
    context = multiprocessing.get_context("fork")
    sent = context.Queue()
    running = [context.Process(target=_prepare, args=(spec, sent)) for _ in range(2)]
    for process in running:
        process.start()
    prints = {sent.get(timeout=60) for _ in running}
    for process in running:
        process.join(60)
    assert len(prints) == 1
    assert [path.name for path in stores_folders()[0].glob("*.npz")] == [tasks.task_file(spec)]


def test_who_does_not_want_to_wait_is_told(tmp_path: Path) -> None:
    spec = local(write(tmp_path / "data.csv", reviews(60)))
    base = stores_folders()[0]
    told = pytest.raises(BusyError, match=f"process {os.getpid()} is preparing")
    with disk.saving(base), disk.held(base, tasks.task_file(spec), wait=True), told:
        load(spec, wait=False)
    assert load(spec, wait=False).train_size > 0


def test_a_killed_preparation_is_made_up_for(tmp_path: Path, home: Path) -> None:
    spec = local(write(tmp_path / "data.csv", reviews(8000)))
    context = multiprocessing.get_context("fork")
    for delay in (0.05, 0.15, 0.3, 0.5):
        process = context.Process(target=_prepare, args=(spec, context.Queue()))
        process.start()
        time.sleep(delay)
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    source = opened(spec)
    assert sum(source.provenance["counts"].values()) == 8000
    assert [path.name for path in stores_folders()[0].iterdir() if not path.name.startswith(".")] == [
        tasks.task_file(spec)
    ]


@real
@pytest.mark.parametrize("name", ["trec", "wnut17", "mnli", "xnli-en"])
def test_real_sets_have_their_counts(name: str) -> None:
    source = opened(DataSpec(name=name, tokenizer="bert", context=128))
    told = source.provenance
    assert told["status"] == ("partial" if name in ("mnli", "xnli-en") else "real")
    for split, count in told["official"].items():
        if told["status"] == "real":
            assert told["rows"][split] == count
    assert {"trec": 5452, "wnut17": 3394, "mnli": 2344, "xnli-en": 2344}[name] == told["rows"]["train"]
    balance = {split: part["labels"] for split, part in tasks.describe(source)["splits"].items()}
    if name == "trec":
        counted = pq.read_table(str(SHARED / "trec" / "test.parquet")).column("label").to_pylist()
        assert list(balance["test"].values()) == np.bincount(counted).tolist()
    if name == "xnli-en":
        assert set(balance["test"].values()) == {1670}
        assert set(balance["validation"].values()) == {830}


@real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("imdb", {"train": 25_000, "test": 25_000}),
        ("ag-news", {"train": 26_638, "test": 7_600}),
        ("sst2", {"train": 67_349, "validation": 872, "test": 1_821}),
        ("snli", {"train": 18_000, "test": 2_000}),
        ("20newsgroups", {"train": 11_314, "test": 7_532}),
        ("squad", {"train": 87_599, "test": 10_570}),
    ],
)
def test_real_large_sets(name: str, rows: dict[str, int]) -> None:
    source = opened(DataSpec(name=name, tokenizer="gpt2", context=256))
    assert source.provenance["rows"] == rows
    told = tasks.describe(source)
    assert told["overlap"]["between"]["train & validation"]["exact"] == 0
    if name != "sst2":  # its validation split is the official one
        assert told["overlap"]["between"]["train & validation"]["normalised"] == 0
    if name == "imdb":
        assert told["splits"]["test"]["labels"] == {"negative": 12_500, "positive": 12_500}
        within, between = told["overlap"]["within"], told["overlap"]["between"]
        assert within["train"]["exact"] + within["validation"]["exact"] == 96  # exact copies, as in the original
        assert within["test"]["exact"] == 199
        assert between["train & test"]["exact"] > 0
        assert source.waste(16) < 0.1
    if name == "squad":
        outputs = []
        for batch in source.eval_batches("test", 64):
            start, end = (np.where(batch["mask"], 0.0, -np.inf) for _ in range(2))
            for place in np.nonzero(batch["start"] >= 0)[0]:
                start[place, batch["start"][place]] = end[place, batch["end"][place]] = 9.0
            outputs.append((batch["index"], start, end))
        scored = source.score("test", outputs)
        assert scored["examples"] == 10_570
        assert scored["exact_match"] > 0.97  # tokens do not always end where answers do
