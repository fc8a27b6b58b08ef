"""Every example runs and says what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parent.parent / "examples"
SAID = {
    "freeze_a_model.py": ["every frozen weight is what it was", "the same logits"],
    "thaw_progressively.py": ["step  5: ", "trains from now on"],
}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_example(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in SAID[name]:
        assert words in done.stdout


def test_the_run_trains(tmp_path):
    words = [
        sys.executable,
        "-m",
        "oelm",
        "train",
        str(EXAMPLES / "run.toml"),
        "--out",
        "run",
        "--set",
        "budget.steps=6",
    ]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "done"
    assert found["params"]["frozen"] > 0
    assert found["frozen_digest"]["start"] == found["frozen_digest"]["end"]
