"""`oelm run`: a study end to end with real training, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


STUDY = """
question = "Does a study run from the command line?"
margin = { percent = 5 }
family = [{ arm = "oelm-freeze", against = "baseline", metric = "perplexity" }]
arms = ["baseline", "oelm-freeze"]

[base]
model = { preset = "gpt-tiny", width = 32, hidden = 64 }
data = { name = "demo", tokenizer = "demo-bpe", context = 32 }
variant = "baseline"
precision = "fp32"
budget = { steps = 6, batch = 4 }
eval_every = 3
eval_tokens = 512

[tuning]
rates = [1e-3, 1e-2]
seeds = [1]

[comparison]
seeds = [11]
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    return path


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "oelm", *map(str, words)]


def oelm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*words), capture_output=True, text=True, check=False, env=environment)


def records(runs: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_bytes()) for path in sorted((runs / "small").glob("*/result.json"))]


def test_tuning_and_comparison_train_for_real_and_only_once(small: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = oelm("run", small, "--devices", "cpu", "--runs", runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "6 runs wanted" in done.stderr  # the plan comes first
    assert "study small: 6 done" in done.stderr
    found = records(runs)
    assert {record["status"] for record in found} == {"done"}
    assert {record["study"] for record in found} == {"small"}
    assert sorted(str(record["row"]) for record in found if "tune" not in str(record["row"])) == [
        "baseline-s11",
        "oelm-freeze-s11",
    ]
    again = oelm("run", small, "--devices", "cpu", "--runs", runs)
    assert again.returncode == 0
    assert "0 done, 6 were done before" in again.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--devices", "9"], 5, "GPU 9 is not there"),
        (["--partition", "gpu"], 2, "belong to --slurm"),
        (["--slurm", "--minutes", "5"], 2, "with --slurm give --time"),
        (["--nproc", "2", "--per-device", "2"], 2, "give one of the two"),
        (["--rows", "nobody"], 2, "is no row, arm, cell"),
        (["--set", "budget.steps=0"], 2, "budget.steps"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    small: Path, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    devices = [] if "--devices" in words else ["--devices", "cpu"]
    done = oelm("run", small, *devices, *words, "--runs", tmp_path / "runs")
    assert done.returncode == code
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last
    assert "Traceback" not in done.stderr


def test_a_dry_run_prints_the_plan_and_makes_nothing(small: Path, tmp_path: Path) -> None:
    done = oelm("run", small, "--devices", "cpu", "--runs", tmp_path / "runs", "--dry-run")
    assert done.returncode == 0
    assert "6 runs wanted" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_failed_runs_end_with_code_8(small: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ["--rows", "baseline", "--set", "data.tokenizer=nothing.json"]
    done = oelm("run", small, "--devices", "cpu", "--runs", runs, *words)
    assert done.returncode == 8
    assert done.stderr.strip().splitlines()[-1].startswith("error: study small: 2 of its runs failed")
    assert {record["status"] for record in records(runs)} == {"failed"}


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again_it_ends_as_if_nothing_had_been(small: Path, tmp_path: Path) -> None:
    words = ["--devices", "cpu", "--rows", "baseline", "--set", "budget.steps=120", "--set", "eval_every=20"]
    assert oelm("run", small, *words, "--runs", tmp_path / "plain").returncode == 0
    runs = tmp_path / "runs"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command("run", small, *words, "--runs", runs), env=environment)
    for _ in range(600):
        if list((runs / "small").glob("*/latest")):
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert oelm("run", small, *words, "--runs", runs).returncode == 0
    logs = [path.read_text() for path in (runs / "small").glob("*/training.log")]
    assert any("resumed at step" in log for log in logs)
    for plain, killed in zip(records(tmp_path / "plain"), records(runs), strict=True):
        assert plain["run_id"] == killed["run_id"]
        assert plain["metrics"] == killed["metrics"]
        assert plain["frozen_digest"] == killed["frozen_digest"]


@pytest.mark.slow
def test_two_processes_train_one_run(small: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = oelm("run", small, "--devices", "cpu", "--runs", runs, "--rows", "baseline-tune-lr0.01-s1", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    (record,) = records(runs)
    assert record["environment"]["world"] == 2  # type: ignore[index]
