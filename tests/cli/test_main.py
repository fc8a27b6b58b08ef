"""The command's frame: one line an error, exit codes, no traceback unless asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest


def oelm(*words, cwd=None, env=None, check=False):
    return subprocess.run(
        [sys.executable, "-m", "oelm", *words], capture_output=True, text=True, cwd=cwd, env=env, check=check
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train", "none.toml"], 2, "no such file"),
        (["plan", "fair-ln"], 2, "did you mean 'fair-lm'?"),
        (["inspect", "gpt-51"], 2, "did you mean"),
        (["bench", "gpt-51"], 2, "did you mean"),
        (["bench", "gpt-tiny", "--arms", "oelmm"], 2, "did you mean 'oelm'"),
    ],
)
def test_a_user_mistake_is_one_line_and_its_code(tmp_path, words, code, said):
    done = oelm(*words, cwd=tmp_path)
    assert done.returncode == code
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(tmp_path):
    done = oelm("--debug", "train", "none.toml", cwd=tmp_path)
    assert "Traceback" in done.stderr


def test_names_with_control_characters_are_escaped(tmp_path):
    done = oelm("train", "a\x1b[31mb\r.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "\\x1b[31m" in done.stderr


def test_a_closed_pipe_is_no_fault(tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m oelm inspect bert-base | head -c 1 > /dev/null"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("fault", [KeyError("gone"), OSError("a library's, not the machine's")])
def test_a_fault_of_ours_is_kept_in_a_file(monkeypatch, capsys, tmp_path, fault):
    from oelm.cli import main

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("OELM_DEBUG", raising=False)
    monkeypatch.setattr(main, "app", Mock(side_effect=fault))
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 1
    line = capsys.readouterr().err.strip()
    assert line.startswith(f"error: a fault of oelm itself ({type(fault).__name__}: {fault}): kept in ")
    (kept,) = tmp_path.glob("oelm-crash-*.txt")
    assert "Traceback" in kept.read_text()


def test_what_the_machine_refuses_is_one_line(monkeypatch, capsys):
    from oelm.cli import main

    monkeypatch.delenv("OELM_DEBUG", raising=False)
    monkeypatch.setattr(main, "app", lambda: Path("a" * 5000).read_text())
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: aaaa")
    assert line.endswith("…: File name too long; check the path, its permissions and the disk")


def test_a_tokenizer_that_is_no_path_is_said(tmp_path):
    long = oelm("plan", "demo", "--set", f"data.tokenizer='{'a' * 5000}'", cwd=tmp_path)
    assert "Traceback" not in long.stderr
    assert "no such file" in long.stdout + long.stderr
    done = oelm("train", "run.toml", "--set", f"data.tokenizer='{'a' * 5000}'", cwd=_with_a_run(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "is unknown; known: bert" in done.stderr


def test_counts_that_no_machine_holds_are_refused(tmp_path):
    for key in ("data.examples=10_000_000_000_000", "data.tokens=9_223_372_036_854_775_808"):
        done = oelm("train", "run.toml", "--set", key, cwd=_with_a_run(tmp_path))
        assert done.returncode == 2
        assert "less than or equal" in done.stderr


def _with_a_run(folder):
    text = 'model = "gpt-tiny"\ndata = {name = "demo", context = 64}\nvariant = "baseline"\nbudget = {steps = 1}\n'
    (folder / "run.toml").write_text(text)
    return folder


def test_version_and_unknown_verb():
    assert oelm("--version", check=True).stdout.startswith("oelm ")
    assert oelm("nonsense").returncode == 2


def test_doctor_says_every_part_in_json(tmp_path):
    done = oelm("doctor", "--json", cwd=tmp_path)
    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert {"python", "torch", "devices", "threads", "orthogonal draw", "compile and thaw", "hub", "slurm"} <= set(
        found
    )
    assert found["orthogonal draw"]["state"] == "ok"
    assert found["torch"]["state"] in ("ok", "note")
    assert all(one["remedy"] for one in found.values() if one["state"] == "bad")
    assert done.returncode == (5 if any(one["state"] == "bad" for one in found.values()) else 0)


def test_bench_prints_ratios_and_writes_json(tmp_path):
    done = oelm("bench", "gpt-tiny", "--steps", "3", "--arms", "oelm,by hand", "--out", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "b.json").read_text())
    assert [one["arm"] for one in written["timings"]] == ["oelm", "by hand"]
    assert all(one["ms"] > 0 for one in written["timings"])
    assert "floor" in done.stdout
