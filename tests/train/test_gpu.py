"""The same promises on a CUDA device: resume bit for bit, masking, both steps, and a thaw that is not ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import assert_same_end, lines
from small_runs import small_run

from oelm.train import step as step_module
from oelm.train.checkpoint import load_weights
from oelm.train.loop import train


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = {"width": 64, "layers": 2, "heads": 2, "hidden": 128, "context": 32, "dropout": 0.1}
THAWING = {"base": "oelm-freeze", "thaw": {"order": "top-down", "start": 6, "end": 14}}


def stop_at(step: int) -> Any:
    def see(line: Any) -> None:
        if line["kind"] == "train" and line["step"] == step:
            raise KeyboardInterrupt

    return see


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fastest"])
def test_resume_is_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    if plain:
        monkeypatch.setattr("oelm.train.prepare.make_step", step_module.Step)
    run = small_run(model=WIDE, variant=THAWING)
    train(run, tmp_path / "a", progress="none")
    for step in (5, 9, 17):
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path / "b", progress="none", checkpoint_every=4, on_event=stop_at(step))
    train(run, tmp_path / "b", progress="none", checkpoint_every=4)
    assert_same_end(tmp_path / "b", tmp_path / "a")


def test_the_fastest_step_trains_as_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(model=WIDE | {"dropout": 0.0}, variant=THAWING)
    train(run, tmp_path / "fast", progress="none")
    monkeypatch.setattr("oelm.train.prepare.make_step", step_module.Step)
    train(run, tmp_path / "plain", progress="none")
    fast, plain = ([x["loss"] for x in lines(tmp_path / n) if x["kind"] == "train"] for n in ("fast", "plain"))
    assert fast == pytest.approx(plain, rel=2e-2)
    assert json.loads((tmp_path / "fast" / "result.json").read_text())["frozen_digest"]["start"] is None


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bad_step_is_masked_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = small_run(model=WIDE, budget__steps=2000, optimizer__name=name)
    monkeypatch.setattr("oelm.train.prepare.make_step", step_module.Step)
    honest = step_module.Step._gradients

    def wrong(self: Any, pieces: Any) -> Any:
        loss = honest(self, pieces)
        self.made = getattr(self, "made", -1) + 1
        if self.made == 13:
            self._params[0].grad[0] = float("nan")
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(step_module.Step, "_gradients", wrong)
        result = train(run, tmp_path / "bad", progress="none")
    assert (result["status"], result["cost"]["steps"]) == ("diverged", 13)
    monkeypatch.setattr("oelm.train.loop.LOOK_EVERY", 1)
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "good", progress="none", checkpoint_every=13, on_event=stop_at(14))
    good, kept = (load_weights(tmp_path / n, "latest")[0] for n in ("good", "bad"))
    assert all(torch.equal(good[key], kept[key]) for key in good)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_other_precisions_learn(tmp_path: Path, precision: str) -> None:
    run = small_run(model=WIDE | {"dropout": 0.0}, precision=precision, budget__steps=60, eval_every=0)
    train(run, tmp_path, progress="none")
    found = [x["loss"] for x in lines(tmp_path) if x["kind"] == "train"]
    assert found[-1] < found[0]
    timing = json.loads((tmp_path / "timing_stats.json").read_text())
    assert timing["steps_total"] == 60
    assert timing["ceiling_flops_per_s"] > 1e12
