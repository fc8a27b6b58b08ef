"""`oelm monitor`: one look as a table or JSON, and the page's address."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "oelm", "monitor", *map(str, words)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine" / "baseline-00000000"
    folder.mkdir(parents=True)
    lines = [{"step": i, "kind": "train", "loss": 5.0 / i, "tokens_per_s": 9.0, "seconds": i} for i in range(1, 30)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "heartbeat").write_text(json.dumps({"step": 29, "total": 50}))
    failed = folder.with_name("oelm-freeze-00000000")
    failed.mkdir()
    record = {"schema": 1, "status": "failed", "error": "out of [red]memory[/red]", "run": {}}
    (failed / "result.json").write_text(json.dumps(record))
    return tmp_path / "runs"


def test_one_look(runs: Path) -> None:
    done = subprocess.run(command("--runs", runs, "--once"), capture_output=True, text=True, check=True)
    assert "mine/baseline-00000000" in done.stdout
    assert "29/50" in done.stdout
    assert "1 running, 1 failed" in done.stdout
    assert "out of [red]memory[/red]" in done.stdout  # shown as it is, not as markup


def test_json(runs: Path) -> None:
    done = subprocess.run(command("--runs", runs, "--json"), capture_output=True, text=True, check=True)
    rows = {row["id"]: row for row in json.loads(done.stdout)["runs"]}
    assert rows["baseline-00000000"]["eta_s"] == 21.0
    assert rows["oelm-freeze-00000000"]["state"] == "failed"


def test_a_study_without_runs_is_said(runs: Path) -> None:
    done = subprocess.run(command("min", "--runs", runs, "--once"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'mine'?" in done.stderr
    empty = subprocess.run(command("--runs", runs / "none", "--once"), capture_output=True, text=True, check=True)
    assert "no runs under" in empty.stderr


def test_the_page_prints_an_address_that_answers(runs: Path) -> None:
    served = subprocess.Popen(
        command("--runs", runs, "--web"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert served.stdout is not None
    try:
        url = served.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", url)
        data = urllib.request.urlopen(url.replace("/?", "/data.json?"), timeout=10).read()
        assert json.loads(data)["states"] == {"running": 1, "failed": 1}
    finally:
        served.terminate()
        served.communicate()
