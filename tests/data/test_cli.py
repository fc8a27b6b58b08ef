"""oelm data, as a person at a terminal meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def oelm(tmp_path: Path) -> Any:
    (tmp_path / "data" / "elsewhere").mkdir(parents=True)
    work = tmp_path / "work"
    work.mkdir()
    environment = os.environ | {
        "OELM_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    environment.pop("OELM_DATA", None)

    def run(*words: str, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "oelm", "data", *words],
            env=environment | more,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        if code:
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
        return done

    return run


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["list", "prepare", "inspect", "tokenizer", "pack", "unpack"])
def test_help_shows_two_examples(oelm: Any, verb: str) -> None:
    said = oelm(verb, "--help").stdout
    assert said.count(f"oelm data {verb}") >= 2
    assert "--json" in said


def test_list_names_every_set_and_where_it_is(oelm: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "tinystories"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a story"}\n')
    rows = {row["name"]: row for row in json.loads(oelm("list", "--json", "--folder", str(tmp_path / "data")).stdout)}
    assert {"tinystories", "wikipedia", "demo", "imdb", "wnut17", "squad", "recall"} <= rows.keys()
    assert (rows["tinystories"]["place"], rows["tinystories"]["status"]) == ("folder", "partial")
    assert (rows["demo"]["place"], rows["demo"]["status"], rows["demo"]["prepared"]) == ("package", "demo", [])
    assert all(row["licence"] for row in rows.values())


def test_prepare_inspect_pack_and_unpack(oelm: Any, tmp_path: Path) -> None:
    words = ("demo", "--tokenizer", "demo-bpe", "--context", "64")
    made = json.loads(oelm("prepare", *words, "--json").stdout)
    assert made["status"] == "demo"
    assert "ready" in oelm("prepare", *words).stdout
    said = json.loads(oelm("inspect", *words, "--json").stdout)
    assert said["fingerprint"] == made["fingerprint"]
    assert said["splits"]["train"]["documents"] > 40
    assert all(count["exact"] == 0 for count in said["overlap"]["between"].values())
    assert "sample: " in oelm("inspect", *words).stdout
    (shard,) = (tmp_path / "home").rglob("validation-00000.tokens")
    shard.write_bytes(shard.read_bytes()[:-2])
    assert f"{shard.name}: has " in oelm("inspect", *words, code=3).stderr
    assert f"{shard.name}: has " in oelm("prepare", *words).stderr
    file = tmp_path / "demo.oelm.xz"
    packed = json.loads(oelm("pack", *words, "--tokens", "20_000", "-o", str(file), "--json").stdout)
    there = json.loads(oelm("unpack", str(file), "--json", OELM_HOME=str(tmp_path / "there")).stdout)
    assert there["fingerprint"] == packed["fingerprint"] != made["fingerprint"]


def test_faults_are_one_line_and_a_code(oelm: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xff\xfea\0")
    local = ("prepare", "local", "--task", "lm", "--tokenizer", "bytes", "--path", str(path))
    assert "is UTF-16" in oelm(*local, code=3).stderr
    assert not list((tmp_path / "home").rglob("*.partial"))
    assert "unknown" in oelm("prepare", "wikipedai", code=2).stderr
    assert "--tokens many" in oelm("prepare", "demo", "--tokens", "many", code=2).stderr
    assert "cannot be written" in oelm("prepare", "demo", "--tokenizer", "bytes", code=5, OELM_HOME="/proc/none").stderr


def test_data_loads_without_torch_and_without_what_it_may_not_need() -> None:
    code = (
        "import sys, oelm.data.open, oelm.data.spec, oelm.cli.data\n"
        "print(*{'torch', 'transformers', 'datasets', 'pyarrow', 'tokenizers', 'huggingface_hub'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
