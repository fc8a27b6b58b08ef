"""Where data is looked for, in which order, and what is said when it is nowhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from oelm.data import hub, sources
from oelm.data.sources import DataSet, Hub, Layout
from oelm.errors import DataError, MachineError


STORIES = DataSet(
    name="stories",
    kind="lm",
    title="stories",
    licence="none",
    layouts=(Layout(files={"train": ("own/train.parquet",), "test": ("own/test.parquet",)}),),
    hub=Hub(id="someone/stories", splits={"train": "train", "test": "validation"}, columns={"text": "story"}),
    official={"train": 3, "test": 2},
    carve={"validation": 0.1},
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OELM_DATA", raising=False)
    monkeypatch.setattr(sources, "shared_folder", lambda: None)


def _parquet(path: Path, rows: int, column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table({column: [f"{path.stem} {n}" for n in range(rows)]}), path)
    return path


def test_the_users_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("named", "environment", "shared"):
        _parquet(tmp_path / name / "own" / "train.parquet", 3)
        _parquet(tmp_path / name / "own" / "test.parquet", 2)
    monkeypatch.setattr(sources, "shared_folder", lambda: tmp_path / "shared")
    found = sources.find(STORIES)
    assert (found.place, found.describe()["status"]) == ("shared", "real")
    monkeypatch.setenv("OELM_DATA", str(tmp_path / "environment"))
    assert sources.find_local(STORIES).root == tmp_path / "environment"  # type: ignore[union-attr]
    found = sources.find(STORIES, tmp_path / "named")
    assert found.place == "folder"
    assert [row["text"] for row in found.rows("train")] == ["train 0", "train 1", "train 2"]


@pytest.mark.parametrize(
    "names",
    [
        ("stories/train.parquet", "stories/test.parquet"),
        ("stories/train-00000-of-00002.parquet", "stories/test-00000-of-00001.parquet"),
        ("stories/data/train-00000-of-00001.parquet", "stories/data/test-00000-of-00001.parquet"),
        ("stories/train/0000.parquet", "stories/test/0000.parquet"),
    ],
)
def test_the_general_layout_has_the_hubs_columns(tmp_path: Path, names: tuple[str, str]) -> None:
    _parquet(tmp_path / names[0], 3, "story")
    _parquet(tmp_path / names[1], 1, "story")
    found = sources.find(STORIES, tmp_path)
    assert found.counts() == {"train": 3, "test": 1}
    said = found.describe()
    assert said["status"] == "partial"
    assert "test has 1 of the official 2 rows" in said["note"]
    assert len(list(found.rows("train"))) == 3


def test_shards_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        _parquet(tmp_path / "stories" / f"train-{number:05d}.parquet", 1, "story")
    rows = [row["text"] for row in sources.find(STORIES, tmp_path).rows("train")]
    assert rows == [f"train-{number:05d} 0" for number in range(3)]


def test_rows_can_be_chosen_by_a_column(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"text": ["a", "b", "c"], "side": ["x", "y", "x"]}), tmp_path / "both.parquet")
    layout = Layout(
        files={"train": ("both.parquet",), "test": ("both.parquet",)},
        only={"train": ("side", "x"), "test": ("side", "y")},
    )
    found = sources.find(DataSet(name="s", kind="lm", title="s", licence="s", layouts=(layout,)), tmp_path)
    assert [row["text"] for row in found.rows("train")] == ["a", "c"]
    assert [row["text"] for row in found.rows("test")] == ["b"]


def test_nowhere_says_the_layout_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(DataError) as caught:
        sources.find(STORIES)
    assert time.monotonic() - begun < 10
    message = str(caught.value)
    assert "stories/{train,test}.parquet" in message
    assert "--folder or OELM_DATA" in message
    assert "cannot be reached" in message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="switched off"):
        sources.find(STORIES)


def test_a_hub_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        time.sleep(1)
        raise OSError("timed out")

    monkeypatch.setattr("urllib.request.urlopen", hang)
    begun = time.monotonic()
    assert not hub.answers(patience=0.2)
    assert time.monotonic() - begun < 0.9


def test_a_named_folder_without_the_set_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no data set 'stories'; expected .*stories/\{train,test\}\.parquet"):
        sources.find(STORIES, tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        sources.find(STORIES, tmp_path / "none")


def test_a_wrong_environment_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"OELM_DATA=.*no such folder"):
        sources.find(STORIES)


def test_the_hub_is_read_as_its_libraries_give_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder of the hub's form stands for the hub: the same loading code reads both."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "repository"
    _parquet(repository / "data" / "train-00000-of-00001.parquet", 3, "story")
    _parquet(repository / "data" / "validation-00000-of-00001.parquet", 2, "story")
    for stream in (False, True):
        local = Hub(id=str(repository), splits=STORIES.hub.splits, columns=STORIES.hub.columns, stream=stream)  # type: ignore[union-attr]
        dataset = DataSet(
            name="stories", kind="lm", title="s", licence="s", hub=local, official={"train": 3, "test": 2}
        )
        found = sources.find(dataset)
        assert found.place == "cache"
        assert found.splits == ("train", "test")
        assert len([row["text"] for row in found.rows("train")]) == 3
        assert [piece.text for piece in found.documents("test")] == [
            "validation-00000-of-00001 0",
            "validation-00000-of-00001 1",
        ]
        assert found.describe()["status"] == "real"
        assert found.identity() == sources.find(dataset).identity()


def test_what_the_hub_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "datasets--someone--stories").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    calls: list[Any] = []

    def broken(*_: Any, **more: Any) -> None:
        calls.append(more)
        raise RuntimeError("Dataset scripts are no longer supported\nand more")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    monkeypatch.setattr(hub, "answers", lambda: True)
    monkeypatch.setattr(hub, "offline", lambda: False)
    with pytest.raises(DataError, match=r"someone/stories.*scripts are no longer supported") as caught:
        sources.find(STORIES)
    assert "\n" not in str(caught.value)
    assert len(calls) == 2  # the cache first, then the hub


def test_a_stream_that_breaks_off_is_one_line() -> None:
    def stream() -> Iterator[dict[str, str]]:
        yield {"story": "one"}
        raise ConnectionError("reset by peer\nand more")

    assert STORIES.hub is not None
    found = sources.HubFound(dataset=STORIES, place="hub", hub=STORIES.hub, loaded={"train": stream()})
    rows = found.rows("train")
    assert next(rows) == {"text": "one"}
    with pytest.raises(MachineError, match=r"^someone/stories \(train\): reading stopped at row 1 \(reset by peer\)"):
        next(rows)


def test_without_the_extra_the_hub_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(hub, "answers", lambda: True)
    monkeypatch.setattr(hub, "offline", lambda: False)
    with pytest.raises(MachineError, match=r"oelm\[data\]"):
        sources.find(STORIES)


def test_identity_follows_content(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "stories" / "train.parquet", 3, "story")
    one = sources.find(STORIES, tmp_path).identity()
    assert sources.find(STORIES, tmp_path).identity() == one
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert sources.find(STORIES, tmp_path).identity() != one


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"picture\.png: cannot be read as data"):
        sources.local_files(tmp_path / "picture.png", {"text": "text"}, "lm")
    with pytest.raises(DataError, match="no such file or folder"):
        sources.local_files(tmp_path / "none", {"text": "text"}, "lm")
    with pytest.raises(DataError, match="no training files"):
        sources.local_files(tmp_path, {"text": "text"}, "lm")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "README.md").write_text("about")
    found = sources.local_files(tmp_path, {"text": "text"}, "lm")
    assert [path.name for path in found.files["train"]] == ["a.txt", "b.txt"]
    (tmp_path / "validation.txt").write_text("v")
    with pytest.raises(DataError, match="no training files"):
        sources.local_files(tmp_path, {"text": "text"}, "lm")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b"])
def test_what_is_no_path_is_said(name: str) -> None:
    with pytest.raises(DataError, match="path"):
        sources.local_files(name, {"text": "text"}, "lm")


def test_a_file_that_vanishes_is_said(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "stories" / "train.parquet", 3, "story")
    found = sources.find(STORIES, tmp_path)
    path.unlink()
    with pytest.raises(MachineError, match=r"train\.parquet: cannot be read"):
        found.identity()
