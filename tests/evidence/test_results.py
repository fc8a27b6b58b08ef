"""Results: one row a run, the same bytes each time, no formulas, no edited file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import lm_study, record, run_study, save

from oelm.errors import DataError, MachineError
from oelm.evidence import results
from oelm.evidence.labels import stratum_of
from oelm.study.rows import expand


@pytest.fixture
def made(tmp_path):
    study = lm_study(seeds=[100, 101, 102])
    run_study(study, tmp_path / "runs", effect={"oelm-freeze": 0.1})
    return study, results.collect(study, tmp_path / "runs")


def test_every_planned_run_is_a_row_with_its_settings_and_numbers(made, tmp_path):
    study, table = made
    assert len(table.rows) == 3 * (3 * 2 + 3)
    for row in table.rows:
        kept = json.loads((tmp_path / "runs" / study.name / row["run_id"] / "result.json").read_text())
        assert row["validation.loss"] == kept["metrics"]["validation"]["loss"]
        assert row["params_frozen"] == kept["params"]["frozen"]
        assert row["seed"] == kept["run"]["seed"]
        assert row["lr"] == kept["run"]["optimizer"]["lr"]
        assert json.loads(row["settings"])["variant"]["freeze"] == kept["run"]["variant"]["freeze"]
        assert table.curves[row["run_id"]][-1][0] == 409_600


def test_writing_and_loading_gives_the_same_table_and_the_same_bytes(made, tmp_path):
    _, table = made
    path = results.write(table, tmp_path / "out")
    first = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert results.load(path) == table
    results.write(results.load(path), tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == first
    assert sorted(first) == ["synthetic.csv", "synthetic.curves.csv", "synthetic.sha256"]


def test_runs_selected_on_test_are_marked_and_stand_alone(tmp_path):
    data = {"name": "imdb", "context": 64, "selection": "test"}
    base = {"model": "gpt-tiny", "data": data, "budget": {"steps": 100}, "optimizer": {}}
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"), seeds=[1], base=base)
    run_study(study, tmp_path / "runs", effect={})
    for row in results.collect(study, tmp_path / "runs").rows:
        assert row["data"] == "imdb (selected on test)"
        assert stratum_of(row).endswith(" on imdb (selected on test)")


@pytest.mark.parametrize("name", ["synthetic.csv", "synthetic.curves.csv"])
def test_an_edited_file_is_refused_by_name(made, tmp_path, name):
    path = results.write(made[1], tmp_path / "out")
    file = tmp_path / "out" / name
    file.write_text(file.read_text().replace("baseline", "basel1ne", 1))
    with pytest.raises(DataError, match=f"{name}.*edited"):
        results.load(path)


def with_examples(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"), seeds=[1, 2])
    for one in expand(study):
        save(tmp_path / "runs", record(one, study.name, loss=3.0), [n % 3 == one.run.seed for n in range(11)])
    return study


def test_test_examples_travel_and_cannot_be_edited(tmp_path):
    study = with_examples(tmp_path)
    table = results.collect(study, tmp_path / "runs")
    assert {count for count, _ in table.right.values()} == {11}
    path = results.write(table, tmp_path / "out")
    assert results.load(path) == table
    kept = tmp_path / "out" / "synthetic.examples.csv"
    text = kept.read_text()
    for changed in (text.replace("11", "12", 1), ""):
        kept.write_text(changed)
        with pytest.raises(DataError, match=r"examples\.csv.*edited"):
            results.load(path)
    kept.unlink()
    with pytest.raises(DataError, match="oelm analyze"):
        results.load(path)
    results.write(results.table(table.study, table.rows, table.curves), tmp_path / "out")
    assert not results.load(path).right


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "examples.json").write_text("{}"), "SHA-256 differs"),
        (lambda folder: (folder / "examples.json").unlink(), "is gone"),
        (
            lambda folder: (folder / "result.json").write_text(
                (folder / "result.json").read_text().replace('"accuracy": 0.', '"accuracy": 0.9')
            ),
            "gives a test accuracy",
        ),
    ],
)
def test_test_examples_that_are_not_the_records_are_refused(tmp_path, change, said):
    study = with_examples(tmp_path)
    change(next((tmp_path / "runs" / study.name).iterdir()))
    with pytest.raises(DataError, match=said):
        results.collect(study, tmp_path / "runs")


def test_a_csv_without_its_digest_is_refused(made, tmp_path):
    path = results.write(made[1], tmp_path / "out")
    path.with_suffix(".sha256").unlink()
    with pytest.raises(DataError, match="oelm analyze"):
        results.load(path)


def test_failed_diverged_missing_and_foreign_runs_are_rows(tmp_path):
    study = lm_study(seeds=[100, 101, 102], tuning=None)
    runs = [one for one in expand(study) if one.arm == "baseline"]
    save(tmp_path, record(runs[0], study.name, loss=3.0))
    save(tmp_path, record(runs[1], study.name, loss=float("nan"), status="diverged"))
    save(tmp_path, record(runs[2], study.name, loss=None, status="failed"))
    other = expand(lm_study(seeds=[7], tuning=None))[0]
    save(tmp_path, record(other, study.name, loss=3.0))
    table = results.collect(study, tmp_path)
    rows = {row["run_id"]: row for row in table.rows}
    assert len(rows) == 9 + 1
    assert rows[runs[1].id]["status"] == "diverged"
    assert rows[runs[1].id]["validation.loss"] is None  # NaN is no number
    assert rows[runs[2].id]["status"] == "failed"
    assert rows[runs[2].id]["error"] == "the loss became NaN at step 7"
    assert sum(row["status"] == "missing" for row in table.rows) == 6
    assert rows[other.id]["purpose"] == "not planned"


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 2, "run": {}}', '{"schema": 1}'])
def test_a_broken_record_is_named(tmp_path, content):
    study = lm_study()
    folder = tmp_path / study.name / "x-00000000"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(content)
    with pytest.raises(DataError, match=r"result\.json"):
        results.collect(study, tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_no_cell_starts_a_formula_and_every_text_comes_back(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("csv")
    row = {"study": "s", "run_id": "r", "error": text, "at": "{}", "arm": text}
    path = results.write(results.table("s", [row]), folder)
    with path.open(newline="") as file:
        cells = next(csv.DictReader(file))
    assert not (cells["error"] or "x").startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    assert results.load(path).rows[0]["error"] == shown


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60))
def test_numbers_come_back_exactly(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("csv")
    path = results.write(results.table("s", [{"study": "s", "run_id": "r", "validation.loss": value}]), folder)
    assert results.load(path).rows[0]["validation.loss"] == value


def test_order_does_not_depend_on_the_order_of_rows(made):
    study, table = made
    assert results.table(study.name, reversed(table.rows), table.curves) == table


def test_writing_into_a_file_is_one_error_line(made, tmp_path):
    path = Path(tmp_path / "file")
    path.write_text("")
    with pytest.raises(MachineError, match="file"):
        results.write(made[1], path)
