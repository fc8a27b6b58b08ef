"""The demo: the real path end to end, reused, and continued after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest


pytestmark = pytest.mark.slow


def start(out, *more):
    words = [sys.executable, "-m", "oelm", "demo", "--quick", "--out", str(out), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_interrupted_continued_and_reused(tmp_path):
    out = tmp_path / "demo"
    first = start(out)
    runs = out / "runs" / "demo"
    begun = time.monotonic()
    while time.monotonic() - begun < 120 and not list(runs.glob("*/result.json")):
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert "Traceback" not in said

    second = start(out, "--json")
    stdout, said = second.communicate(timeout=200)
    assert second.returncode == 0, said
    assert "used again" in said
    found = json.loads(stdout)
    assert "no evidence" in found["note"]
    assert any(path.endswith(".html") for path in found["reports"])
    records = [json.loads(path.read_text()) for path in runs.glob("*/result.json")]
    assert len(records) == 12
    assert {record["data"]["status"] for record in records} == {"demo"}
    assert all(record["status"] == "done" for record in records)

    begun = time.monotonic()
    third = start(out)
    _, said = third.communicate(timeout=60)
    assert third.returncode == 0
    assert "12 of them are finished already" in said
    assert time.monotonic() - begun < 45
    page = (out / "reports" / "demo.html").read_text()
    assert "no evidence" in page.lower()
    assert "<svg" in page
