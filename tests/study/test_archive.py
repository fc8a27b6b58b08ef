"""Runs as things to find, compare, drop and pack."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from small_studies import TUNED, run_study, study

from oelm.errors import BusyError, ConfigError
from oelm.study import archive, claim
from oelm.study.folder import find_run, look, run_folders
from oelm.study.plan import make_plan, take_over
from oelm.study.rows import Study
from oelm.study.runner import Options


@pytest.fixture
def runs(tmp_path: Path, fake: str) -> Path:
    run_study(study(axes={"seed": [1, 2]}), tmp_path, fake)
    for folder in run_folders(tmp_path / "small"):
        shutil.rmtree(folder / "checkpoints")
        for step in ("step-3", "step-5"):
            (folder / "checkpoints" / step).mkdir(parents=True)
            (folder / "checkpoints" / step / "model.safetensors").write_bytes(b"x" * 1000)
        (folder / "best").write_text("step-3")
    return tmp_path


def test_find_by_words_and_settings(runs: Path) -> None:
    assert len(archive.find(runs, ())) == 4
    assert [one.id.rpartition("-")[0] for one in archive.find(runs, ("oelm", "seed=2"))] == ["oelm-freeze-seed2"]
    assert len(archive.find(runs, ("optimizer.lr=1e-3",))) == 4
    assert len(archive.find(runs, ("variant.tie=false", "variant.freeze=none"))) == 2
    assert archive.find(runs, ("optimizer.lr=2",)) == []
    assert archive.find(runs, (), "failed") == []


def test_a_part_of_an_id_must_be_enough(runs: Path) -> None:
    assert find_run(runs, "baseline-seed1").name.startswith("baseline-seed1-")
    with pytest.raises(ConfigError, match="could be"):
        find_run(runs, "baseline")
    with pytest.raises(ConfigError, match="no such run"):
        find_run(runs, "nothing")


def test_differences_are_by_setting(runs: Path) -> None:
    one, other = find_run(runs, "baseline-seed1"), find_run(runs, "baseline-seed2")
    assert archive.differences(one, other) == [("seed", 1, 2)]
    assert archive.differences(one, one) == []


def test_archive_keeps_the_records_and_says_what_was_dropped(runs: Path, tmp_path: Path) -> None:
    folders = run_folders(runs / "small")
    done = archive.archive(folders, tmp_path / "a.tar.gz", drop=True, keep_best=True)
    assert done.runs == 4
    assert [name for name, _ in done.dropped] == [f"{folder.name}/checkpoints/step-5" for folder in folders]
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        names = packed.getnames()
    assert f"small/{folders[0].name}/result.json" in names
    assert not any("checkpoints" in name for name in names)
    assert (folders[0] / "checkpoints" / "step-3").is_dir()
    assert json.loads((folders[0] / "dropped.json").read_text())[0]["bytes"] == 1000
    assert look(folders[0]).state == "done"
    assert archive.describe(folders[0])["dropped"]


def test_the_checkpoints_of_a_failed_run_stay(runs: Path, tmp_path: Path) -> None:
    folder = run_folders(runs / "small")[0]
    record = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(record | {"status": "failed"}))
    done = archive.archive([folder], tmp_path / "a.tar.gz", drop=True)
    assert (done.runs, done.dropped) == (1, [])
    assert (folder / "checkpoints" / "step-5").is_dir()


def test_an_archive_is_never_overwritten_nor_empty(runs: Path, tmp_path: Path) -> None:
    folders = run_folders(runs / "small")
    (tmp_path / "a.tar.gz").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        archive.archive(folders, tmp_path / "a.tar.gz")
    with pytest.raises(ConfigError, match="no finished runs"):
        archive.archive([], tmp_path / "b.tar.gz")
    assert (tmp_path / "a.tar.gz").read_text() == "mine"


def test_a_run_that_is_being_trained_is_left_alone(runs: Path) -> None:
    folder = run_folders(runs / "small")[0]
    (folder / "result.json").unlink()
    assert claim.take(runs / "small", folder.name)
    with pytest.raises(BusyError, match="being trained"):
        archive.remove(folder)
    assert folder.is_dir()


def test_remove_frees_what_it_says(runs: Path) -> None:
    folder = run_folders(runs / "small")[0]
    assert archive.remove(folder) > 2000
    assert not folder.exists()


def test_what_another_study_has_finished_is_taken_over(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"baseline-tune-lr0.01-s1": "diverge", "oelm-freeze-s12": "data"}))
    run_study(study(**TUNED), tmp_path, fake)
    monkeypatch.delenv("FAKE_FAULTS")
    wider = study("wider", arms=["baseline", "oelm-freeze", "q-only"], **TUNED)
    options = Options(trainer=fake)
    assert any(
        "6 of these runs are finished in other studies" in note for note in notes(wider, tmp_path, "oelm-freeze*")
    )
    assert take_over(wider, tmp_path, options) == 15  # the failed one is not
    assert take_over(wider, tmp_path, options) == 0
    outcome, _ = run_study(wider, tmp_path, fake)
    assert (len(outcome.already), len(outcome.finished)) == (15, 9)
    for folder in run_folders(tmp_path / "wider"):
        if look(tmp_path / "small" / folder.name).state in ("done", "diverged"):
            assert (folder / "result.json").read_bytes() == (
                tmp_path / "small" / folder.name / "result.json"
            ).read_bytes()
            assert not (folder / "checkpoints").exists()


def notes(one: Study, runs: Path, *rows: str) -> list[str]:
    return make_plan(one, runs, Options(rows=rows)).notes


def test_a_run_that_has_begun_is_not_replaced_by_its_twin(tmp_path: Path, fake: str) -> None:
    run_study(study(), tmp_path, fake)
    name = run_folders(tmp_path / "small")[0].name
    (tmp_path / "other" / name).mkdir(parents=True)
    assert archive.adopt(tmp_path / "other" / name) is None
    assert archive.adopt(tmp_path / "other" / f"{name}x") is None
