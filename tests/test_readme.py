"""The README tells the truth: its Python blocks run and print what it says; its shell lines are real commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = [(m.group(1), m.group(2)) for m in re.finditer(r"```(\w+)\n(.*?)```", README, re.S)]


def test_python_blocks_print_what_follows_them(tmp_path):
    checked = 0
    for (kind, code), (after, expected) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if kind != "python":
            continue
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        if after == "text":
            assert done.stdout.rstrip() == expected.rstrip()
            checked += 1
    assert checked >= 1


def shell_lines() -> list[str]:
    lines = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("oelm ")]


@pytest.mark.parametrize("verb", sorted({line.split()[1] for line in shell_lines()}))
def test_every_verb_of_the_readme_answers_help(verb):
    done = subprocess.run([sys.executable, "-m", "oelm", verb, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize("line", ["oelm inspect bert-base", "oelm doctor --json", "oelm data list"])
def test_lines_that_need_nothing_run(line, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", *line.split()], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if "inspect" in line:
        for number in ("109,484,547", "95,310,339", "14,174,208"):
            assert number in done.stdout
