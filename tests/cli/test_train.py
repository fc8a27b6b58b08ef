"""oelm train as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.errors import BusyError, ConfigError, DivergedError, OelmError
from oelm.train.folder import RunFolder, run_toml
from oelm.train.run import Run


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oelm.data.recall.HELD_OUT_EXAMPLES", 32)


def small_run(steps: int = 24) -> Run:
    table = {
        "model": {"width": 16, "layers": 2, "heads": 2, "hidden": 32, "context": 32},
        "data": {"name": "recall", "context": 32, "pairs": 4, "symbols": 32, "examples": 64},
        "variant": "oelm-freeze",
        "optimizer": {"lr": 3e-3, "warmup": 2},
        "budget": {"steps": steps, "batch": 4},
        "eval_every": 8,
    }
    return Run.read(table, where="test")


def typed(*words: str) -> str:
    found = CliRunner().invoke(app, ["train", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my run.toml"
    path.write_text(run_toml(small_run()))
    return path


def test_it_trains_and_says_where(file: Path, tmp_path: Path) -> None:
    said = typed(str(file), "--out", str(tmp_path / "out"), "--progress", "none")
    assert "done" in said
    assert "validation: loss" in said
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "done"


def test_one_process_of_many_speaks(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (str(file), "--out", str(tmp_path / "out"), "--progress", "none")
    assert "done" in typed(*words)
    monkeypatch.setenv("RANK", "1")
    assert typed(*words) == ""


def test_a_wrong_way_to_show_progress_is_said_before_anything_is_made(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="progress 'bar': unknown; known: auto, line, live, none"):
        typed(str(file), "--out", str(tmp_path / "out"), "--progress", "bar")
    assert not (tmp_path / "out").exists()


def test_json_is_the_record_and_set_changes_the_run(file: Path, tmp_path: Path) -> None:
    words = ("--set", "optimizer.lr=1e-2", "--set", "variant=baseline", "--set", "budget.steps=4", "--json")
    found = json.loads(typed(str(file), "--out", str(tmp_path / "out"), "--progress", "none", *words))
    assert found["run"]["optimizer"]["lr"] == 0.01
    assert found["run"]["variant"]["freeze"] == "none"
    assert found["cost"]["steps"] == 4


def test_the_default_folder_has_the_files_name_and_the_id(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed(str(file), "--progress", "none", "--set", "budget.steps=2")
    run = small_run(2)
    assert (tmp_path / "runs" / "train" / f"my-run-{run.identity()}" / "result.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "optimizer.lrr=1"), "did you mean 'lr'"),
        (("--set", "optimizer.lr"), "write KEY=VALUE"),
        (("--set", "seed.x=1"), "seed is no table"),
        (("--set", 'optimizer.lr="1e-3"'), "write the number without quotes"),
    ],
)
def test_a_wrong_setting_is_one_line(file: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        typed(str(file), "--out", str(tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        typed(str(tmp_path / "none.toml"))


def test_divergence_has_its_exit_code(file: Path, tmp_path: Path) -> None:
    words = ("--set", "optimizer.lr=10.0", "--set", "optimizer.clip=0.0", "--set", "budget.steps=100")
    with pytest.raises(DivergedError, match="try a lower") as found:
        typed(str(file), "--out", str(tmp_path / "out"), "--progress", "none", *words)
    assert found.value.exit_code == 7


def test_a_busy_folder_has_its_exit_code(file: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "out", small_run()), pytest.raises(OelmError) as found:
        typed(str(file), "--out", str(tmp_path / "out"))
    assert type(found.value) is BusyError
    assert found.value.exit_code == 6


def test_help_has_two_examples() -> None:
    said = CliRunner().invoke(app, ["train", "--help"]).output
    assert said.count("oelm train run.toml") == 2
