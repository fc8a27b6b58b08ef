"""The runner: what is done once, what is tried again, what a death leaves. A counting trainer stands in for training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from small_studies import TUNED, run_study, small, study

from oelm.errors import ConfigError, MachineError, Preempted
from oelm.study import claim, devices, runner
from oelm.study.folder import look, records, run_folders
from oelm.study.rows import expand
from oelm.study.runner import Options, Runner, wanted
from oelm.study.schedule import Schedule


def starts(folder: Path) -> Counter[str]:
    """How often each row was started."""
    return Counter(line.split()[0] for line in (folder / "starts.log").read_text().splitlines())


def test_tuning_then_comparison_in_one_command(tmp_path: Path, fake: str) -> None:
    one = study(**TUNED)
    outcome, _ = run_study(one, tmp_path, fake, per_device=2)
    assert outcome.complete
    assert len(outcome.finished) == 16
    by_row = {record["row"]: record for record in records(tmp_path / "small")}
    assert by_row["oelm-freeze-s12"]["run"]["optimizer"]["lr"] == 3e-3  # the counting trainer's best rate
    assert set(starts(tmp_path / "small").values()) == {1}
    assert not list((tmp_path / "small" / claim.FOLDER).iterdir())


def test_a_second_command_starts_nothing(tmp_path: Path, fake: str) -> None:
    run_study(study(), tmp_path, fake)
    before = (tmp_path / "small" / "starts.log").read_text()
    outcome, _ = run_study(study(), tmp_path, fake)
    assert (outcome.finished, outcome.already) == ([], ["baseline", "oelm-freeze"])
    assert (tmp_path / "small" / "starts.log").read_text() == before


def test_rows_may_be_chosen_by_row_arm_or_label(tmp_path: Path) -> None:
    task = [{"label": "a", "data.context": 32}, {"label": "b", "data.context": 16}]
    one = study(axes={"task": task})
    assert len(wanted(one, tmp_path, Options(rows=("a",)))) == 2
    assert len(wanted(one, tmp_path, Options(rows=("baseline", "oelm-freeze-b")))) == 3
    with pytest.raises(ConfigError, match="did you mean 'baseline'"):
        wanted(one, tmp_path, Options(rows=("basline",)))


def test_failures_are_recorded_and_the_rest_goes_on(tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"baseline-seed1": "data", "baseline-seed2": "bug", "oelm-freeze-seed1": "disk"}
    monkeypatch.setenv("FAKE_FAULTS", json.dumps(faults))
    one = study(axes={"seed": [1, 2, 3]})
    outcome, said = run_study(one, tmp_path, fake)
    assert sorted(outcome.failed) == sorted(faults)
    assert sorted(outcome.finished) == ["baseline-seed3", "oelm-freeze-seed2", "oelm-freeze-seed3"]
    assert set(starts(tmp_path / "small").values()) == {1}  # none of these is mended by trying again
    assert all("\n" not in line for line in [*outcome.failed.values(), *said])
    assert "disk full" in outcome.failed["oelm-freeze-seed1"]
    assert "ZeroDivisionError: a bug over two lines" in outcome.failed["baseline-seed2"]
    statuses = Counter(record["status"] for record in records(tmp_path / "small"))
    assert statuses == {"done": 3, "failed": 3}
    monkeypatch.delenv("FAKE_FAULTS")
    outcome, _ = run_study(one, tmp_path, fake)
    assert outcome.complete
    assert len(outcome.already) == 3


def test_diverged_is_a_result_and_not_tried_again(tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"baseline": "diverge"}))
    outcome, _ = run_study(study(), tmp_path, fake)
    assert outcome.complete
    assert outcome.diverged == ["baseline"]
    again, _ = run_study(study(), tmp_path, fake)
    assert sorted(again.already) == ["baseline", "oelm-freeze"]


def test_a_killed_trainer_is_tried_again_and_then_given_up(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"baseline": "kill-once", "oelm-freeze": "kill"}))
    outcome, _ = run_study(study(), tmp_path, fake)
    assert outcome.finished == ["baseline"]
    assert "SIGKILL (out of memory?)" in outcome.failed["oelm-freeze"]
    assert starts(tmp_path / "small") == {"baseline": 2, "oelm-freeze": 1 + runner.PATIENCE}


def test_a_disk_without_room_starts_nothing_and_says_so(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.cost, "disk_bytes", lambda run: 10**18 if run.variant.freeze == "qk" else 1)
    outcome, said = run_study(study(), tmp_path, fake)
    assert outcome.finished == ["baseline"]
    assert not outcome.complete
    assert any("MB free" in line and "free space and run again" in line for line in said)


def test_memory_that_was_too_small_beside_others_is_tried_alone(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"baseline": "memory-beside"}))
    outcome, said = run_study(study(), tmp_path, fake, per_device=2)
    assert outcome.complete
    assert any("tried again alone" in line for line in said)


def test_a_foreign_folder_is_said_and_left_alone(tmp_path: Path, fake: str) -> None:
    one = study()
    first = expand(one)[0]
    folder = tmp_path / "small" / first.id
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"schema": 99}')
    outcome, _ = run_study(one, tmp_path, fake)
    assert "schema 99" in outcome.failed["baseline"]
    assert outcome.finished == ["oelm-freeze"]
    assert (folder / "result.json").read_text() == '{"schema": 99}'


def test_comparisons_without_their_tuning_are_said_to_wait(tmp_path: Path, fake: str) -> None:
    outcome, _ = run_study(study(**TUNED), tmp_path, fake, rows=("baseline-s1?",))
    assert outcome.finished == []
    assert outcome.blocked == ["baseline: waits for its rate; run its tuning too (--rows 'baseline-tune-*')"]
    assert not outcome.complete


def test_what_is_kept_of_a_finished_run_is_chosen(tmp_path: Path, fake: str) -> None:
    for keep, there in (("all", ["step-4", "step-5"]), ("best", ["step-4"]), ("none", [])):
        run_study(study(arms=["baseline"]), tmp_path / keep, fake, keep=keep)
        (folder,) = run_folders(tmp_path / keep / "small")
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == there
        dropped = json.loads((folder / "dropped.json").read_text()) if keep != "all" else []
        assert len(dropped) == 2 - len(there)
        assert look(folder).state == "done"


# ---- claims


def test_of_two_takers_one_wins_and_a_released_claim_can_be_taken(tmp_path: Path) -> None:
    held = claim.take(tmp_path, "a-1")
    assert held is not None
    assert claim.take(tmp_path, "a-1") is None
    assert held.beat()
    held.release()
    assert claim.holder(tmp_path, "a-1") is None
    assert claim.take(tmp_path, "a-1") is not None


def test_a_dead_holder_is_replaced_and_notices_when_it_wakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = claim.take(tmp_path, "a-1")
    assert held is not None
    content = json.loads(held.path.read_text()) | {"machine": "another", "host": "other"}
    held.path.write_text(json.dumps(content))
    assert claim.take(tmp_path, "a-1") is None  # its heartbeat is fresh
    old = time.time() - claim.GONE - 5
    os.utime(held.path, (old, old))
    taken = claim.take(tmp_path, "a-1")
    assert taken is not None
    assert taken.number == 2
    assert not held.beat()
    held.release()
    assert taken.mine()


def test_a_process_id_that_is_used_again_is_not_the_holder(tmp_path: Path) -> None:
    held = claim.take(tmp_path, "a-1")
    assert held is not None
    content = json.loads(held.path.read_text())
    held.path.write_text(json.dumps(content | {"pid": 1, "started": "0"}))
    assert claim.take(tmp_path, "a-1") is not None


TAKER = """
import sys, pathlib
from oelm.study import claim
won = [i for i in range(200) if claim.take(pathlib.Path(sys.argv[1]), f"r-{i}")]
print(len(won), flush=True)
sys.stdin.read()
"""


def test_processes_that_race_share_the_claims_without_overlap(tmp_path: Path) -> None:
    many = [
        subprocess.Popen([sys.executable, "-c", TAKER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    won = [int(one.stdout.readline()) for one in many if one.stdout]
    for one in many:
        one.communicate()
    assert sum(won) == 200


# ---- deaths and rivals

SCRIPT = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from small_studies import study, run_study
one = study(axes={"seed": list(range(6))})
outcome, _ = run_study(one, pathlib.Path(sys.argv[1]), "fake_trainer:train", per_device=2)
sys.exit(0 if outcome.complete else 8)
"""


def start_runner(runs: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(runs), str(Path(__file__).parent)])


def trainers(runs: Path) -> set[int]:
    """Processes that started a run and are still there."""
    log = runs / "small" / "starts.log"
    pids = {int(line.split()[1]) for line in log.read_text().splitlines()} if log.exists() else set()
    return {pid for pid in pids if claim.process_start(pid)}


def until(condition: object, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_a_killed_runner_leaves_no_trainer_and_the_next_one_finishes(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.4")
    first = start_runner(tmp_path)
    assert until(lambda: len(trainers(tmp_path)) == 2)
    first.kill()
    first.wait()
    assert until(lambda: not trainers(tmp_path), 5)
    monkeypatch.setenv("FAKE_SECONDS", "0.001")
    assert start_runner(tmp_path).wait(timeout=60) == 0
    assert [look(path).state for path in run_folders(tmp_path / "small")] == ["done"] * 12


def test_two_runners_on_one_folder_never_run_a_row_twice(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.02")
    both = [start_runner(tmp_path) for _ in range(2)]
    assert [one.wait(timeout=60) for one in both] == [0, 0]
    counts = starts(tmp_path / "small")
    assert len(counts) == 12
    assert set(counts.values()) == {1}


def test_a_row_that_one_runner_failed_is_not_tried_by_the_other(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.02")
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"baseline-seed0": "data", "oelm-freeze-seed5": "bug"}))
    monkeypatch.setenv("FAKE_GATE", str(tmp_path / "gate"))  # what fails, fails when both have begun
    both = [start_runner(tmp_path) for _ in range(2)]
    assert until(lambda: len(trainers(tmp_path)) == 4)
    (tmp_path / "gate").touch()
    assert [one.wait(timeout=60) for one in both] == [8, 8]
    assert set(starts(tmp_path / "small").values()) == {1}
    assert start_runner(tmp_path).wait(timeout=60) == 8  # a later command does try again
    counts = starts(tmp_path / "small")
    assert {row for row, count in counts.items() if count == 2} == {"baseline-seed0", "oelm-freeze-seed5"}


def test_asked_to_stop_it_lets_the_runs_save_and_goes_on_later(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.4")
    first = start_runner(tmp_path)
    assert until(lambda: len(trainers(tmp_path)) == 2)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=30) != 0
    assert not trainers(tmp_path)
    assert not list((tmp_path / "small" / claim.FOLDER).iterdir())
    assert {look(path).state for path in run_folders(tmp_path / "small")} == {"partial"}


# ---- devices


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_listed", lambda: ["0", "1"])
    assert devices.parse_devices("1,0") == ["1", "0"]
    assert devices.parse_devices(None) == ["0", "1"]
    assert devices.parse_devices("cpu") == ["cpu"]
    for text, said in (("7", "this machine has: 0, 1"), ("1,1", "twice"), ("gpu", "neither cpu"), ("", "empty")):
        with pytest.raises((ConfigError, MachineError), match=said):
            devices.parse_devices(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.parse_devices("all") == ["1"]
    with pytest.raises(MachineError, match="not there"):
        devices.parse_devices("0")


def test_a_worker_sees_its_device_alone() -> None:
    assert devices.environment("3", 1)["CUDA_VISIBLE_DEVICES"] == "3"
    assert devices.environment("cpu", 1)["CUDA_VISIBLE_DEVICES"] == ""
    assert devices.environment("3", 4)["OELM_BESIDE"] == "4"


def test_longest_first(tmp_path: Path, fake: str) -> None:
    one = study(arms=["baseline"], axes={"budget.steps": [2, 9, 5]})
    run_study(one, tmp_path, fake)
    log = (tmp_path / "small" / "starts.log").read_text().split()[::3]
    assert log == ["baseline-steps9", "baseline-steps5", "baseline-steps2"]


def test_options_do_not_enter_a_runs_identity(tmp_path: Path) -> None:
    one = study()
    assert [p.id for p in wanted(one, tmp_path, Options(devices=("3",), per_device=4))] == [p.id for p in expand(one)]
    assert small()["arms"] == ["baseline", "oelm-freeze"]
    assert Runner(one, tmp_path, Options()).folder == tmp_path / "small"


def test_when_the_time_is_over_runs_are_saved_and_the_same_command_continues(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.05")
    one = study(axes={"budget.steps": [40]})
    begun = time.monotonic()
    with pytest.raises(Preempted, match="time is over with 2 runs or more to do; what ran is saved"):
        run_study(one, tmp_path, fake, minutes=0.5 / 60)
    assert time.monotonic() - begun < 10
    assert [look(folder).state for folder in run_folders(tmp_path / "small")] == ["partial"]
    assert not list((tmp_path / "small" / claim.FOLDER).iterdir())
    monkeypatch.setenv("FAKE_SECONDS", "0")
    outcome, _ = run_study(one, tmp_path, fake)
    assert sorted(outcome.finished) == ["baseline-steps40", "oelm-freeze-steps40"]


def test_nothing_begins_that_would_not_finish_in_time(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.02")
    one = study(arms=["baseline"], axes={"budget.steps": [20, 2000]})
    run_study(one, tmp_path, fake, rows=("baseline-steps20",))
    for record in records(tmp_path / "small"):  # as measured: a minute
        path = tmp_path / "small" / record["run_id"] / "result.json"
        path.write_text(json.dumps(record | {"cost": {"seconds": 60.0, "tokens_per_s": 10.0}}))
    with pytest.raises(Preempted, match="with 1 runs or more to do"):
        run_study(one, tmp_path, fake, minutes=0.1)
    assert starts(tmp_path / "small") == {"baseline-steps20": 1}


def test_tuning_goes_first_and_then_seed_by_seed(tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a comparison is much longer, and the first arm's could begin before the second arm is tuned."""
    monkeypatch.setenv("FAKE_SECONDS", "0")
    budgets = {"axes": {"budget.steps": [2, 2000]}, "tuning": TUNED["tuning"] | {"at": {"budget.steps": 2}}}
    run_study(study(**TUNED | budgets), tmp_path, fake, rows=("*-tune-*", "*-steps2000-*"))
    rows = [line.split()[0] for line in (tmp_path / "small" / "starts.log").read_text().splitlines()]
    tuned = [row for row in rows if "-tune-" in row]
    assert len(tuned) == 12
    assert rows[:12] == tuned
    assert rows[12:] == [f"{arm}-steps2000-s{seed}" for seed in (11, 12) for arm in ("baseline", "oelm-freeze")]


def test_what_a_pass_took_is_held_against_the_estimates_of_now(tmp_path: Path) -> None:
    """The first estimates are far off; once records correct them, what ran before must not correct them again."""
    schedule = Schedule("cpu", minutes=1.0)
    (one,) = expand(study(arms=["baseline"]))
    schedule.took(one, 50.0)
    assert schedule.fits(one, tmp_path / one.id)
    schedule.learn([{"status": "done", "run": one.run.model_dump(mode="json"), "cost": {"seconds": 50.0}}])
    assert schedule.fits(one, tmp_path / one.id)
    schedule.took(one, 90.0)
    assert not schedule.fits(one, tmp_path / one.id)  # the median of 50 and 90 is more than a minute
