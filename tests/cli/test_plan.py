"""`oelm plan`: the plan on stdout, mistakes in one line on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def oelm(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oelm", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_a_plan_says_runs_cost_and_what_will_not_work(tmp_path: Path) -> None:
    done = oelm("plan", "original", "--rows", "GPT-06,GPT-07", "--runs", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 runs wanted, 0 finished" in done.stdout
    assert "44.90 M" in done.stdout
    assert "7.01 %" in done.stdout
    assert "device-hours" in done.stdout
    assert "1 seed cannot reach significance" in done.stdout


def test_json_is_for_machines(tmp_path: Path) -> None:
    plan = json.loads(oelm("plan", "fair-lm", "--runs", tmp_path, "--json").stdout)
    assert plan["states"]["queued"] == 10 * 4 + 2  # tuning of every arm, and the two rows of their own
    assert plan["tests"] == 5
    assert plan["warnings"] == [] or all(isinstance(line, str) for line in plan["warnings"])
    assert len({row["id"] for row in plan["rows"]}) == plan["wanted"]


def test_a_laptop_plans_for_gpus_that_are_elsewhere(tmp_path: Path) -> None:
    words = ("plan", "original", "--rows", "GPT-06,GPT-07", "--runs", tmp_path)
    here, there = (json.loads(oelm(*words, "--devices", name, "--json").stdout) for name in ("cpu", "gpu:2"))
    assert (here["device"], there["device"]) == ("cpu", "cuda")
    assert there["device_hours_left"] < here["device_hours_left"] / 100
    said = oelm(*words, "--devices", "gpu:2").stdout
    assert " on one GPU, about " in said
    assert " on 2 (" in said


def test_names_are_never_cut(tmp_path: Path) -> None:
    done = oelm("plan", "fair-bert", "--runs", tmp_path)
    assert " orthogonalize-frozen " in done.stdout
    assert "…" not in done.stdout


def test_the_list_of_studies(tmp_path: Path) -> None:
    listed = oelm("plan", "list")
    assert listed.returncode == 0
    for name in ("original", "fair-lm", "demo", "recall"):
        assert name in listed.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "orginal"], "did you mean 'original'?"),
        (["plan", "original", "--rows", "GPT-08"], "--rows: 'GPT-08' is no row"),
        (["plan", "demo", "--set", "optimizer.lrr=1"], "did you mean 'lr'?"),
        (["plan", "demo", "--set", "steps"], "write key=value"),
        (["plan", "demo", "--devices", "17"], "GPU 17 is not there"),
        (["plan", "nowhere/x.toml"], "no such file"),
    ],
)
def test_mistakes_take_one_line_and_code_2_or_5(words: list[str], said: str, tmp_path: Path) -> None:
    done = oelm(*words, "--runs", tmp_path)
    assert done.returncode in (2, 5)
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_row_twice_is_said(tmp_path: Path) -> None:
    path = tmp_path / "twice.toml"
    base = 'question = "Is a row twice refused?"\n[base]\nmodel = "gpt-tiny"\ndata = { name = "demo", context = 64 }\nvariant = "baseline"\n'
    path.write_text(f"{base}budget = {{ steps = 1 }}\n" + '[[rows]]\nname = "A"\n[[rows]]\nname = "A"\n')
    done = oelm("plan", path, "--runs", tmp_path)
    assert done.returncode == 2
    assert "row 'A' is there twice" in done.stderr
