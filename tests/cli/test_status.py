"""`oelm status`: how far each study is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def oelm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oelm", "status", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_states_by_study(tmp_path: Path) -> None:
    for study, status in (("one", "done"), ("one", "failed"), ("two", "diverged")):
        folder = tmp_path / study / f"row-{status}-00000000"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"schema": 1, "status": status, "run": {}}))
    said = json.loads(oelm("--runs", tmp_path, "--json").stdout)
    assert [(one["study"], one["states"]) for one in said] == [
        ("one", {"failed": 1, "done": 1}),
        ("two", {"diverged": 1}),
    ]
    assert "1 diverged" in oelm("--runs", tmp_path).stdout
    assert oelm("tow", "--runs", tmp_path).returncode == 2


def test_nothing_yet(tmp_path: Path) -> None:
    done = oelm("--runs", tmp_path)
    assert done.returncode == 0
    assert "no runs under" in done.stderr
