"""Watching: states from files alone, and never an error, whatever is being written."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from small_studies import run_study, study

from oelm.errors import ConfigError
from oelm.study import claim, folder, watch
from oelm.study.rows import expand
from oelm.study.watch import Series, Watcher, main_metric, sparkline, study_states
from oelm.train.folder import RunFolder


def begun(tmp_path: Path) -> Path:
    """A run folder in which a trainer has just logged."""
    one = expand(study())[0]
    place = tmp_path / "small" / one.id
    with RunFolder(place, one.run) as home:
        home.open_metrics(0)
        for step in (1, 2, 3):
            home.log({"step": step, "kind": "train", "loss": 4.0 - step, "tokens_per_s": 5.0, "seconds": step * 2.0})
        home.log({"step": 3, "kind": "eval", "split": "validation", "loss": 1.5, "perplexity": 4.5})
        home.beat(step=3, total=5)
    return place


def row_of(tmp_path: Path) -> dict[str, Any]:
    return Watcher(tmp_path).snapshot(curves=True)["runs"][0]


def test_a_running_run_shows_where_it_is(tmp_path: Path) -> None:
    begun(tmp_path)
    row = row_of(tmp_path)
    assert row["state"] == "running"
    assert (row["step"], row["steps"], row["loss"]) == (3, 5, 1.0)
    assert row["eta_s"] == pytest.approx(4.0)
    assert row["validation"] == {"loss": 1.5, "perplexity": 4.5}
    assert row["curve"] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert row["evals"] == [(3, 1.5)]


def test_a_dead_trainer_leaves_a_partial_run(tmp_path: Path) -> None:
    place = begun(tmp_path)
    (place / "lock").write_text(f"pid 999999999 on {claim.socket.gethostname()}")
    assert row_of(tmp_path)["state"] == "partial"


def test_a_trainer_of_another_machine_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    place = begun(tmp_path)
    (place / "lock").write_text("pid 1 on elsewhere")
    assert row_of(tmp_path)["state"] == "running"
    old = time.time() - folder.QUIET - 5
    os.utime(place / "heartbeat", (old, old))
    assert row_of(tmp_path)["state"] == "partial"


def test_a_claimed_run_without_a_heartbeat_is_stalled(tmp_path: Path) -> None:
    place = begun(tmp_path)
    held = claim.take(tmp_path / "small", place.name)
    assert held is not None
    old = time.time() - folder.QUIET - 5
    os.utime(place / "heartbeat", (old, old))
    data = json.loads(held.path.read_text())
    held.path.write_text(json.dumps(data | {"since": old}))
    assert row_of(tmp_path)["state"] == "stalled"


def test_finished_failed_and_queued(tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"baseline": "data"}))
    run_study(study(), tmp_path, fake)
    states = study_states(tmp_path)
    assert states[0]["states"] == {"failed": 1, "done": 1}
    (tmp_path / "small" / watch.WANTED).write_text(json.dumps([{"id": "later-12345678", "steps": 7}]))
    rows = Watcher(tmp_path, "small").snapshot()["runs"]
    assert [row["state"] for row in rows] == ["failed", "queued", "done"]
    assert "openwebtext" in rows[0]["error"]
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        Watcher(tmp_path, "smal").snapshot()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b"{"),
        ("result.json", b"[]"),
        ("result.json", b'{"schema": 2}'),
        ("result.json", b'{"schema": 1, "run_id": "another-00000000", "status": "done"}'),
    ],
)
def test_foreign_records_are_said_not_raised(tmp_path: Path, name: str, content: bytes) -> None:
    place = begun(tmp_path)
    (place / name).write_bytes(content)
    row = row_of(tmp_path)
    assert row["state"] == "foreign"
    assert "result.json" in row["error"]
    assert "\n" not in row["error"]


@pytest.mark.parametrize("name", ["heartbeat", "environment.json", "run.toml", "metrics.jsonl", "lock"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"null", b'{"step": 3', b"[[[["])
def test_broken_files_never_break_a_look(tmp_path: Path, name: str, content: bytes) -> None:
    place = begun(tmp_path)
    (place / name).write_bytes(content)
    assert row_of(tmp_path)["state"] in folder.State.__args__  # type: ignore[attr-defined]


def test_a_thousand_looks_while_a_trainer_writes(tmp_path: Path) -> None:
    one = expand(study())[0]
    place = tmp_path / "small" / one.id
    stop = threading.Event()

    def write() -> None:
        with RunFolder(place, one.run) as home:
            home.open_metrics(0)
            step = 0
            while not stop.is_set():
                step += 1
                home.log({"step": step, "kind": "train", "loss": 1 / step, "seconds": step / 100})
                home._beat = 0.0
                home.beat(step=step, total=10**6)

    writer = threading.Thread(target=write)
    writer.start()
    while not (place / "metrics.jsonl").exists() or not (place / "metrics.jsonl").stat().st_size:
        assert writer.is_alive()
    watcher = Watcher(tmp_path)
    while not watcher.snapshot()["runs"]:  # the writer has begun
        time.sleep(0.01)
    try:
        seen = [row for _ in range(300) for row in watcher.snapshot(curves=True)["runs"]]
    finally:
        stop.set()
        writer.join()
    assert {row["state"] for row in seen} <= {"running", "queued", "partial"}
    steps = [row["step"] or 0 for row in seen]
    assert steps == sorted(steps)
    assert max(len(row["curve"]) for row in seen) <= watch.POINTS + 1


def test_a_curve_is_read_on_and_thinned_and_starts_again_when_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "kind": "train", "loss": float(i)}) + "\n" for i in range(5000)]
    path.write_text("".join(lines[:3000]) + lines[3000][:10])
    series = Series(path)
    series.update()
    assert series.last_train["step"] == 2999
    with path.open("a") as file:
        file.write(lines[3000][10:] + "".join(lines[3001:]))
    series.update()
    assert series.last_train["step"] == 4999
    assert len(series.train) <= watch.POINTS + 1
    path.write_text("".join(lines[:10]))
    series.update()
    assert series.last_train["step"] == 9


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    place = begun(tmp_path)
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "kind": "train", "loss": NaN, "tokens_per_s": Infinity}\n')
    row = row_of(tmp_path)
    assert row["loss"] is None
    json.dumps(Watcher(tmp_path).snapshot(curves=True), allow_nan=False)


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    line = sparkline([float(i) for i in range(100)])
    assert len(line) <= 16
    assert (line[0], line[-1]) == ("▁", "█")


def test_the_number_a_person_reads_first() -> None:
    assert main_metric({"accuracy": 0.5, "loss": 1.0}) == "acc 50.00%"
    assert main_metric({"loss": 1.0, "perplexity": 2.0}) == "ppl 2.00"
    assert main_metric(None) == ""
