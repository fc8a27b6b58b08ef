"""`oelm runs` and `oelm status`: find, show, compare, drop and pack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oelm.train.folder import RunFolder
from oelm.train.run import Run, run_id


def oelm(*words: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oelm", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two finished runs that differ in their rate, and one that was cut off."""
    for seed, rate, status in ((1, 1e-3, "done"), (1, 1e-2, "done"), (2, 1e-3, "")):
        data: dict[str, Any] = {"model": "gpt-tiny", "data": {"name": "demo", "context": 64}, "variant": "baseline"}
        run = Run.read(data | {"budget": {"steps": 5}, "seed": seed, "optimizer": {"lr": rate}}, where="test")
        folder = tmp_path / "runs" / "mine" / run_id(f"row-lr{rate:g}-s{seed}", run)
        with RunFolder(folder, run) as home:
            home.open_metrics(0)
            if status:
                metrics = {"validation": {"loss": 1.0, "perplexity": 2.7}, "test": None, "best": None}
                plain = run.model_dump(mode="json")
                record = {"schema": 1, "run_id": folder.name, "status": status, "metrics": metrics, "run": plain}
                home.write("result.json", record)
        (folder / "checkpoints" / "step-5").mkdir(parents=True)
        (folder / "checkpoints" / "step-5" / "model.safetensors").write_bytes(b"0" * 2_000_000)
    return tmp_path / "runs"


def test_ls_by_words_settings_and_state(runs: Path) -> None:
    assert json.loads(oelm("runs", "ls", "--runs", runs, "--json").stdout)[0]["study"] == "mine"
    assert oelm("runs", "ls", "optimizer.lr=0.01", "--runs", runs).stdout.count("mine") == 1
    assert oelm("runs", "ls", "mine", "--state", "partial", "--runs", runs).stdout.count("row-lr0.001-s2") == 1
    assert "no such runs" in oelm("runs", "ls", "else", "--runs", runs).stderr


def test_show_and_diff(runs: Path) -> None:
    shown = oelm("runs", "show", "row-lr0.01", "--runs", runs)
    assert "optimizer.lr = 0.01" in shown.stdout
    assert "validation.perplexity = 2.7" in shown.stdout
    different = oelm("runs", "diff", "row-lr0.001-s1", "row-lr0.01-s1", "--runs", runs)
    assert different.stdout == "optimizer.lr: 0.001 -> 0.01\n"
    missing = oelm("runs", "show", "row-lr1", "--runs", runs)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


def test_rm_asks_first(runs: Path) -> None:
    kept = oelm("runs", "rm", "row-lr0.01", "--runs", runs, stdin="n\n")
    assert "nothing was deleted" in kept.stderr
    gone = oelm("runs", "rm", "row-lr0.01", "--runs", runs, "--yes")
    assert "deleted 1 runs, 2.0 MB" in gone.stderr
    assert len(list((runs / "mine").iterdir())) == 2


def test_archive_says_what_was_dropped(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "kept.tar.gz"
    done = oelm("runs", "archive", "mine", "--to", target, "--drop", "--runs", runs)
    assert done.returncode == 0, done.stderr
    assert "2 runs" in done.stderr
    assert "1 runs are not finished and were left out" in done.stderr
    assert done.stderr.count("dropped row-") == 2
    assert target.stat().st_size < 20_000
    assert oelm("runs", "archive", "mine", "--to", target, "--runs", runs).returncode == 2


def test_the_groups_help_names_its_verbs() -> None:
    text = oelm("runs", "--help").stdout
    for verb in ("ls", "show", "diff", "rm", "archive"):
        assert verb in text
