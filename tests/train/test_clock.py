"""Time and progress: what is measured, what is left out, what is shown; and that showing never stops training."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import small_run

import oelm
from oelm.data.recall import RecallSource
from oelm.errors import ConfigError, MachineError
from oelm.models.build import build
from oelm.models.gpt import GPT
from oelm.models.shapes import Shape
from oelm.train.clock import Clock
from oelm.train.folder import RunFolder, finite, run_toml
from oelm.train.loop import train
from oelm.train.prepare import flops_per_token
from oelm.train.progress import Progress, duration, line, open_sinks
from oelm.train.run import Run
from oelm.values import parse_toml


def clock_of(times: list[float]) -> Clock:
    clock = Clock(torch.device("cpu"))
    clock.steps.extend(times)
    clock.tokens.extend([10.0] * len(times))
    return clock


def test_the_first_hundred_steps_and_outliers_are_left_out() -> None:
    steady = [1.0 + 0.01 * n for n in range(50)]
    summary = clock_of([9.0] * 100 + [*steady, 50.0]).summary()
    assert summary["steps_total"] == 151
    assert summary["steps_measured"] == 50
    assert summary["median_step_time"] == pytest.approx(np.median(steady))
    assert summary["mean_step_time"] == pytest.approx(np.mean(steady))
    assert summary["std_step_time"] == pytest.approx(np.std(steady))
    assert summary["p95_step_time"] == pytest.approx(np.percentile(steady, 95))
    assert summary["p99_step_time"] == pytest.approx(np.percentile(steady, 99))
    assert (summary["min_step_time"], summary["max_step_time"]) == pytest.approx((1.0, 1.49))
    assert summary["tokens_per_s"] == pytest.approx(500 / sum(steady))
    assert "first 100 steps" in summary["left_out"]


def test_too_few_steps_are_null_and_never_zero() -> None:
    summary = clock_of([1.0] * 100).summary()
    assert summary["steps_measured"] == 0
    assert summary["median_step_time"] is None
    assert summary["tokens_per_s"] is None
    assert summary["validation_time_mean"] is None


def test_steps_that_did_not_happen_are_forgotten() -> None:
    clock = clock_of([1.0, 2.0, 3.0])
    assert clock.forget_after(1) == 20
    assert list(clock.steps) == [1.0]


def test_a_clock_goes_on_after_a_resume() -> None:
    clock = clock_of([1.0, 2.0])
    other = Clock(torch.device("cpu"))
    other.load(clock.tensors(), 100.0)
    assert list(other.steps) == [1.0, 2.0]
    assert 100 < other.seconds < 105


@pytest.mark.parametrize("variant", ["baseline", "oelm-freeze"])
@pytest.mark.parametrize("changes", [{}, {"tied": False, "positions": "rope"}, {"kv_heads": 2, "head": "tag"}])
def test_flops_of_a_token_are_those_that_torch_counts(variant: str, changes: dict[str, Any]) -> None:
    shape = Shape(width=64, layers=3, heads=4, hidden=128, vocab=1000, context=32, **changes)
    model = build(shape, vocab=1000, labels=3, seed=0, context=32)
    oelm.apply(model, variant, seed=0)
    counted = oelm.account(model, length=32).flops
    assert counted is not None
    assert isinstance(model, GPT)
    assert flops_per_token(model, 32) * 32 == counted.total


def test_mfu_is_the_share_of_what_a_product_reaches_here(tmp_path: Path) -> None:
    result = train(small_run(budget__steps=4), tmp_path, progress="none")
    found = json.loads((tmp_path / "timing_stats.json").read_text())
    model = build(small_run().model, vocab=RecallSource(small_run().data).vocab_size, seed=0, context=32)
    oelm.apply(model, "oelm-freeze", seed=0)
    assert isinstance(model, GPT)
    flops = result["cost"]["tokens_per_s"] * flops_per_token(model, 32)
    assert found["mfu"] == pytest.approx(flops / found["ceiling_flops_per_s"], rel=1e-6)
    assert 0 < found["mfu"] < 1


def test_the_line_leaves_out_what_is_not_known() -> None:
    now = {"step": 1200, "loss": 3.14159, "seconds": 61, "eta": 3700, "frozen": "7.0%", "mfu": 0.41}
    assert line("run", 5000, now) == "run 1,200/5,000 · loss 3.1416 · MFU 41% · 1:01 < 1:01:40 · frozen 7.0%"
    assert duration(None) == "?"


def test_an_unknown_mode_or_tracker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'live'"):
        Progress("lives", tmp_path, "x", 1, quiet=False, sinks=[])
    monkeypatch.setenv("OELM_TRACK", "tensorbord")
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        open_sinks(tmp_path, "x", {})
    monkeypatch.setenv("OELM_TRACK", "trackio")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MachineError, match="pip install trackio"):
        open_sinks(tmp_path, "x", {})


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("OELM_TRACK", "tensorboard")
    train(small_run(), tmp_path, progress="none")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("eval/loss")] == [8, 16, 24]
    assert len(events.Scalars("train/loss")) == 24


def test_wandb_and_trackio_share_one_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        seen: list[Any] = []  # noqa: RUF012

        def init(self, **how: Any) -> None:
            self.seen.append(("init", how["project"], how["name"]))

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.seen.append((step, numbers["train/loss"]) if "train/loss" in numbers else (step,))

        def finish(self) -> None:
            self.seen.append("finish")

    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setenv("OELM_TRACK", "wandb")
    train(small_run(budget__steps=3), tmp_path / "run", progress="none")
    assert fake.seen[0] == ("init", "oelm", "run")
    assert fake.seen[-1] == "finish"
    assert len(fake.seen) == 2 + 3 + 1


def test_a_broken_tracker_or_closed_pipe_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def log(self, numbers: Any, step: int) -> None:
            raise RuntimeError("no network")

        def close(self) -> None:
            raise RuntimeError("no network")

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("oelm.train.loop.open_sinks", lambda *_: [Broken()])
    monkeypatch.setattr(sys, "stderr", Closed())
    assert train(small_run(), tmp_path, progress="line")["status"] == "done"
    assert "tracker Broken failed (no network)" in (tmp_path / "training.log").read_text()


def test_lines_go_to_stderr_and_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run(), tmp_path / "run", progress="line")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "run 1/24 · loss 3." in shown.err
    assert "checkpoint step=8 saved" in shown.err
    assert "frozen 19.0%" in shown.err
    assert "checkpoint step=24 saved" in (tmp_path / "run" / "training.log").read_text()


def test_the_live_line_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(small_run(), tmp_path, progress="live")["status"] == "done"
    assert capsys.readouterr().out == ""


# -- the folder


def test_numbers_that_are_not_finite_become_null() -> None:
    assert finite({"a": [float("nan"), 1.0, {"b": float("inf")}], 2: "x"}) == {"a": [None, 1.0, {"b": None}], "2": "x"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"variant": {"base": "progressive", "layers": [0, 1]}},
        {
            "data": {
                "name": "local",
                "path": 'a "b"\\c\u007f\n\u00e9',
                "task": "classify",
                "columns": {"text a": "\x1b"},
                "context": 32,
            }
        },
        {"model": {"path": "some/model", "head": "lm"}},
    ],
)
def test_run_toml_reads_back_as_the_run(changes: dict[str, Any]) -> None:
    run = small_run(**changes)
    assert Run.read(parse_toml(run_toml(run), where="x"), where="x") == run


def test_the_heartbeat_is_rare_and_says_where(tmp_path: Path) -> None:
    with RunFolder(tmp_path, small_run()) as home:
        home.beat(step=1)
        home.beat(step=2)
    assert json.loads((tmp_path / "heartbeat").read_text())["step"] == 1


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        train(small_run(), tmp_path / "file", progress="none")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        train(small_run(), tmp_path / "file" / "below", progress="none")
