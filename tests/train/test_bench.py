"""oelm bench: every arm does the same work, and the table says what freezing may save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oelm
from oelm.models.build import build
from oelm.models.shapes import PRESETS, Shape
from oelm.train.bench import GPT_ARMS, HUB_ARMS, step_flops


def bench(*words: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "oelm", "bench", *words, "--device", "cpu", "--steps", "10", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (json.loads(done.stdout) if done.returncode == 0 else {}), done


def test_the_floor_counts_the_operations_that_torch_counts() -> None:
    shape = PRESETS["gpt-tiny"]
    assert isinstance(shape, Shape)
    flops = oelm.account(build(shape), length=64, batch=3).flops
    assert flops is not None
    assert flops.attention is not None
    assert step_flops(shape, 3, 64) == pytest.approx(flops.total - flops.attention / 2, rel=0.02)


@pytest.mark.slow
def test_arms_of_our_own_shapes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arms = [arm for arm in GPT_ARMS if not arm.endswith("compiled")]
    found, done = bench("gpt-tiny", "--batch", "2", "--arms", ",".join(arms), "--out", str(tmp_path / "table.json"))
    assert [one["arm"] for one in found["timings"]] == arms, done.stderr
    assert json.loads((tmp_path / "table.json").read_text()) == found
    losses = {one["arm"]: one["losses"] for one in found["timings"]}
    assert losses["oelm"] == losses["oelm plain"]  # on a CPU they are one step
    assert losses["oelm frozen"] != losses["oelm"]
    assert 0 < found["freezing"]["ceiling_share"] < 0.5


@pytest.mark.slow
def test_a_fine_tuning_step_has_the_loss_curve_of_hugging_faces_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    transformers.BertConfig(vocab_size=200, **small).save_pretrained(tmp_path / "bert")
    arms = [arm for arm in HUB_ARMS if not arm.endswith("compiled")]
    found, done = bench(str(tmp_path / "bert"), "--batch", "4", "--context", "16", "--arms", ",".join(arms))
    assert [one["arm"] for one in found["timings"]] == arms, done.stderr
    losses = {one["arm"]: one["losses"] for one in found["timings"]}
    assert losses["oelm"] == pytest.approx(losses["Trainer"], abs=1e-5)
    assert len(set(losses["oelm"])) == len(losses["oelm"]) == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt-512", "--arms", "oelm,Trainer"], "arm 'Trainer' is unknown for gpt-512"),
        (["bert-bas"], "did you mean 'bert-base'?"),
        (["t5-small"], "has no classifier to time"),
    ],
)
def test_what_it_cannot_time_is_said_in_one_line(words: list[str], said: str) -> None:
    _, done = bench(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
