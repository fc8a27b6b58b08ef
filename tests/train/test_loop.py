"""One run from its value to its record: what is measured, what stops it, what it refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import assert_same_end, lines
from small_runs import small_run

import oelm
from oelm.data.open import load
from oelm.data.recall import RecallSource
from oelm.errors import BusyError, CheckpointError, ConfigError, FrozenWeightsChanged, MethodError, OutOfMemory
from oelm.models.build import build
from oelm.train import step as step_module
from oelm.train.checkpoint import load_weights
from oelm.train.folder import RunFolder
from oelm.train.loop import train
from oelm.train.run import Run, run_id
from oelm.train.state import State


def trained(run: Run, folder: Path, **options: Any) -> dict[str, Any]:
    return train(run, folder, progress="none", **options)


# -- the record


def test_a_run_leaves_all_its_files(tmp_path: Path) -> None:
    run = small_run()
    folder = tmp_path / run_id("row", run)
    result = trained(run, folder, study="study", row="row")
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result))
    assert set(result) == {
        *("schema", "run_id", "study", "row", "status", "run", "metrics", "params", "frozen_digest", "logit_std"),
        *("data", "cost", "environment", "error", "curve"),
    }
    assert (result["status"], result["study"], result["row"], result["run_id"]) == ("done", "study", "row", folder.name)
    assert Run.read(result["run"], where="x") == run
    assert result["frozen_digest"]["start"] == result["frozen_digest"]["end"] is not None
    assert result["params"]["total"] == result["params"]["trainable"] + result["params"]["frozen"]
    assert result["params"]["frozen"] == 2 * 2 * 16 * 16
    assert result["data"]["tokens_seen"] == 24 * 4 * 32
    assert result["data"]["examples_seen"] == 24 * 4
    assert [tokens for tokens, _ in result["curve"]] == [8 * 128, 16 * 128, 24 * 128]
    assert result["metrics"]["validation"]["loss"] == result["curve"][-1][1]
    assert math.isfinite(result["metrics"]["test"]["loss"])
    assert result["metrics"]["best"]["loss"] == min(loss for _, loss in result["curve"])
    files = {p.name for p in folder.iterdir()}
    assert files >= {
        "run.toml",
        "environment.json",
        "training.log",
        "metrics.jsonl",
        "timing_stats.json",
        "result.json",
    }
    assert files >= {"checkpoints", "latest", "best", "heartbeat"}
    timing = json.loads((folder / "timing_stats.json").read_text())
    assert timing["steps_total"] == 24
    assert timing["steps_measured"] == 0
    assert timing["median_step_time"] is None
    assert timing["validation_count"] == 3
    assert timing["best_validation_loss"] == result["metrics"]["best"]["loss"]
    assert Run.read(oelm_toml(folder), where="x") == run


def oelm_toml(folder: Path) -> dict[str, Any]:
    from oelm.values import load_toml

    return load_toml(folder / "run.toml")


def test_the_lines_of_metrics(tmp_path: Path) -> None:
    trained(small_run(), tmp_path)
    found = lines(tmp_path)
    train_lines = [line for line in found if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == list(range(1, 25))
    assert [line["tokens"] for line in train_lines] == [128 * n for n in range(1, 25)]
    assert all({"loss", "lr", "grad_norm", "tokens_per_s", "seconds"} <= set(line) for line in train_lines)
    assert train_lines[0]["lr"] == pytest.approx(1.5e-3)
    assert [(line["step"], line["split"]) for line in found if line["kind"] == "eval"] == [
        (n, "validation") for n in (8, 16, 24)
    ]


def test_two_trainings_of_one_run_are_equal_bit_for_bit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        trained(small_run(), tmp_path / name)
    assert_same_end(tmp_path / "a", tmp_path / "b")


def test_where_it_runs_changes_nothing(tmp_path: Path) -> None:
    trained(small_run(), tmp_path / "a")
    trained(small_run(), tmp_path / "b", checkpoint_every=3, keep_last=1, compact=True)
    a, b = (load_weights(tmp_path / name, "latest")[0] for name in "ab")
    assert set(a) - set(b) == {name for name in a if ".q." in name or ".k." in name or "query" in name or "key" in name}
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_the_test_split_is_read_with_the_weights_validation_chose(tmp_path: Path) -> None:
    """At a rate that ruins the model in the second half, the best is an early one."""
    run = small_run(optimizer__lr=0.5, optimizer__warmup=20, optimizer__clip=0.0, eval_every=4)
    result = trained(run, tmp_path)
    best = result["metrics"]["best"]["step"]
    assert best < 24
    weights, step = load_weights(tmp_path, "best")
    assert step == best
    source = RecallSource(run.data)
    model = build(run.model, vocab=source.vocab_size, seed=run.seed, context=32)
    oelm.apply(model, run.variant, seed=run.seed)
    model.load_state_dict(weights, strict=False)
    from oelm.train.objectives import objective_for

    found = objective_for(run.model, source).evaluate(model, source, "test", device="cpu", batch=4)
    assert found["loss"] == result["metrics"]["test"]["loss"]


def test_a_classifier_keeps_which_test_examples_it_got_right(tmp_path: Path) -> None:
    text = "".join(f"{n} {'ab'[n % 3 == 0] * 4},{'no' if n % 3 else 'yes'}\n" for n in range(240))
    (tmp_path / "data.csv").write_text("text,label\n" + text)
    data = {"name": "local", "path": str(tmp_path / "data.csv"), "task": "classify", "tokenizer": "bytes"}
    run = small_run(
        model__head="classify", model__causal=False, data={**data, "context": 16}, budget__steps=6, eval_every=3
    )
    result = trained(run, tmp_path / "run")
    said = json.loads((tmp_path / "run" / "examples.json").read_text())
    assert result["examples"]["sha256"] == hashlib.sha256((tmp_path / "run" / "examples.json").read_bytes()).hexdigest()
    source = load(run.data)
    weights, _ = load_weights(tmp_path / "run", "best")
    model = build(run.model, vocab=source.vocab_size, labels=2, seed=run.seed, context=16)
    oelm.apply(model, run.variant, seed=run.seed)
    model.load_state_dict(weights, strict=False)
    model.eval()
    right = {}
    for batch in source.eval_batches("test", 3):
        logits = model.logits(model(torch.as_tensor(batch["inputs"]), mask=torch.as_tensor(batch["mask"])))
        for index, label, guess in zip(batch["index"], batch["labels"], logits.argmax(-1), strict=True):
            right[int(index)] = bool(int(guess) == label)
    bits = "".join(f"{byte:08b}" for byte in base64.b64decode(said["right"]))[: said["count"]]
    assert bits == "".join("01"[right[index]] for index in range(len(right)))
    assert bits.count("1") / len(bits) == pytest.approx(result["metrics"]["test"]["accuracy"])


# -- what a step computes


def plain_losses(run: Run, steps: int) -> tuple[list[float], list[float], torch.nn.Module]:
    """The same run by twenty plain lines of torch."""
    source = RecallSource(run.data)
    model = build(run.model, vocab=source.vocab_size, seed=run.seed, context=run.data.context)
    oelm.apply(model, run.variant, seed=run.seed)
    trained_ones = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained_ones, lr=run.optimizer.lr, weight_decay=run.optimizer.weight_decay)
    losses, norms = [], []
    for n in range(steps):
        batch = source.train_batch(seed=run.seed, step=n, batch=run.budget.batch)
        inputs, targets = torch.from_numpy(batch["inputs"]), torch.from_numpy(batch["targets"])
        loss = F.cross_entropy(model.logits(model(inputs)).flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained_ones, 1.0)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


def test_it_is_the_plain_torch_loop(tmp_path: Path) -> None:
    run = small_run(model__dropout=0.0, optimizer={"lr": 1e-2, "schedule": "constant"}, budget__steps=12)
    losses, norms, model = plain_losses(run, 12)
    trained(run, tmp_path)
    mine = [line for line in lines(tmp_path) if line["kind"] == "train"]
    assert [line["loss"] for line in mine] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in mine] == pytest.approx(norms, rel=1e-4)
    weights, _ = load_weights(tmp_path, "latest")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_golden_first_step(tmp_path: Path) -> None:
    """If you did not mean to change what one step computes, this is a bug; else put the new numbers here."""
    trained(small_run(model__dropout=0.0, budget__steps=2), tmp_path)
    first = lines(tmp_path)[0]
    weights, _ = load_weights(tmp_path, "latest")
    square = sum(float(w.double().square().sum()) for w in weights.values())
    assert (first["loss"], first["grad_norm"], math.sqrt(square)) == pytest.approx(GOLDEN, rel=1e-4)


GOLDEN = (3.4831924, 2.7863050, 12.0731632)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_changes_no_result(tmp_path: Path, parts: int) -> None:
    """Also where the parts have different numbers of targets."""
    changes = {"model__dropout": 0.0, "budget__batch": 8, "budget__steps": 6, "eval_every": 0}
    whole = trained(small_run(**changes), tmp_path / "whole")
    split = trained(small_run(**changes, budget__accumulate=parts), tmp_path / "split")
    a, b = ([line for line in lines(tmp_path / name) if line["kind"] == "train"] for name in ("whole", "split"))
    assert [x["loss"] for x in a] == pytest.approx([x["loss"] for x in b], rel=1e-5)
    assert [x["grad_norm"] for x in a] == pytest.approx([x["grad_norm"] for x in b], rel=1e-4)
    assert whole["metrics"]["test"]["loss"] == pytest.approx(split["metrics"]["test"]["loss"], rel=1e-4)


def test_it_overfits_eight_examples(tmp_path: Path) -> None:
    run = small_run(
        model={"width": 32, "layers": 2, "heads": 2, "hidden": 64, "context": 32, "dropout": 0.0},
        variant="baseline",
        data__examples=8,
        budget={"steps": 150, "batch": 8},
        optimizer={"lr": 1e-2, "warmup": 10},
        eval_every=0,
    )
    trained(run, tmp_path)
    assert lines(tmp_path)[-2]["loss"] < 0.02


# -- stopping


def test_early_stopping_by_validation(tmp_path: Path) -> None:
    run = small_run(optimizer={"lr": 0.3, "clip": 0.0}, budget__steps=200, budget__patience=2, eval_every=4)
    result = trained(run, tmp_path)
    assert result["status"] == "done"
    assert result["cost"]["steps"] < 200
    assert result["cost"]["steps"] == result["metrics"]["best"]["step"] + 8
    assert [line["event"] for line in lines(tmp_path) if line["kind"] == "event"] == ["early stop"]


def poisoned(monkeypatch: pytest.MonkeyPatch, at: int, *, gradient: bool) -> None:
    """Make the loss, or one gradient alone, NaN in step `at` (from 0)."""
    honest = step_module.Step._gradients

    def wrong(self: Any, pieces: Any) -> Any:
        loss = honest(self, pieces)
        self.made = getattr(self, "made", -1) + 1
        if self.made != at:
            return loss
        if gradient:
            self._params[0].grad[0] = float("nan")
            return loss
        for parameter in self._params:
            parameter.grad.fill_(float("inf"))
        return loss * float("nan")

    monkeypatch.setattr(step_module.Step, "_gradients", wrong)


@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("at", [0, 13])
def test_divergence_is_a_result_with_the_last_good_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, name: str, gradient: bool
) -> None:
    run = small_run(budget__steps=2000, optimizer__name=name)  # looks every ten steps
    poisoned(monkeypatch, at, gradient=gradient)
    result = trained(run, tmp_path)
    assert result["status"] == "diverged"
    assert result["error"].startswith(f"step {at + 1}: ")
    assert result["cost"]["steps"] == at
    assert result["data"]["tokens_seen"] == at * 128
    assert result["metrics"]["test"] is None
    if at:
        assert result["curve"][0][0] == 8 * 128
        weights, step = load_weights(tmp_path, "latest")
        assert step == at
        assert all(torch.isfinite(w).all() for w in weights.values())
        assert [line["step"] for line in lines(tmp_path) if line["kind"] == "train"] == [10, 13]
    assert trained(run, tmp_path) == json.loads(json.dumps(result))  # and it stays so


def test_a_step_that_float16_skipped_has_no_norm() -> None:
    """Not infinity, which a checkpoint's JSON cannot hold."""
    state = State(step=2)
    state.took([3.0, 2.0], [math.inf, 0.5])
    again = State.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False)))
    assert again == state
    assert again.means() == (2.5, 0.5)
    state.took([1.0], [math.inf])
    assert State(step=1, pending=[[1.0, None]]).means() == (1.0, None)


def test_masking_leaves_the_weights_of_the_last_good_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(budget__steps=2000)
    with monkeypatch.context() as patch:
        patch.setattr("oelm.train.loop.LOOK_EVERY", 1)
        with pytest.raises(KeyboardInterrupt):
            trained(run, tmp_path / "stopped", on_event=_interrupt_at(13), checkpoint_every=13)
    poisoned(monkeypatch, 13, gradient=True)
    trained(run, tmp_path / "diverged")
    good, step = load_weights(tmp_path / "stopped", "latest")
    assert step == 13
    kept, _ = load_weights(tmp_path / "diverged", "latest")
    assert all(torch.equal(good[name], kept[name]) for name in good)


def _interrupt_at(step: int) -> Any:
    def see(line: Any) -> None:
        if line["kind"] == "train" and line["step"] == step + 1:
            raise KeyboardInterrupt

    return see


def test_a_loss_that_explodes_is_divergence(tmp_path: Path) -> None:
    run = small_run(optimizer={"lr": 10.0, "clip": 0.0, "schedule": "constant"}, budget__steps=400, eval_every=0)
    result = trained(run, tmp_path)
    assert result["status"] == "diverged"
    assert "exploded" in result["error"] or "not finite" in result["error"]
    assert result["cost"]["steps"] < 200


def test_an_exploded_run_keeps_the_weights_from_before(tmp_path: Path) -> None:
    """However often it saves, and however few checkpoints stay."""
    rising = {"lr": 10.0, "clip": 0.0, "schedule": "linear", "warmup": 200}
    result = trained(small_run(optimizer=rising, budget__steps=400, eval_every=0), tmp_path, checkpoint_every=2)
    assert "exploded" in result["error"]
    losses = {line["step"]: line["loss"] for line in lines(tmp_path) if line["kind"] == "train"}
    assert max(losses) == result["cost"]["steps"]  # the curve goes to the end
    _, step = load_weights(tmp_path, "latest")
    assert 0 < step < result["cost"]["steps"] - 20
    assert losses[step] < 3 * losses[2]


# -- refusals


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    run = small_run()
    with RunFolder(tmp_path / "run", run), pytest.raises(BusyError, match=r"in use by pid \d+ on "):
        trained(run, tmp_path / "run")
    assert trained(run, tmp_path / "run")["status"] == "done"


def test_the_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    trained(small_run(), tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"optimizer.lr is 0.003 there, 0.004 here"):
        trained(small_run(optimizer__lr=4e-3), tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before


def test_a_frozen_weight_that_moves_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step_module.Step._update

    def wrong(self: Any) -> None:
        honest(self)
        with torch.no_grad():
            next(p for p in self.model.parameters() if not p.requires_grad).view(-1)[0] += 1e-7

    monkeypatch.setattr(step_module.Step, "_update", wrong)
    with pytest.raises(FrozenWeightsChanged, match="frozen"):
        trained(small_run(), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


def test_what_trains_must_get_a_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step_module.Step.__init__

    def spare(self: Any, model: Any, *args: Any, **more: Any) -> None:
        honest(self, model, *args, **more)
        model.spare = torch.nn.Linear(2, 2)

    monkeypatch.setattr(step_module.Step, "__init__", spare)
    with pytest.raises(MethodError, match=r"spare.weight and 1 more: trains but got no gradient"):
        trained(small_run(), tmp_path)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            ", 2.5 GiB more asked for",
        ),
        (MemoryError(), "used at most"),
        (RuntimeError("can't allocate memory: you tried to allocate 5368709120 bytes."), ", 5.0 GiB more asked for"),
    ],
)
def test_too_little_memory_is_one_line_with_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, asked: str
) -> None:
    def greedy(self: Any, pieces: Any) -> Any:
        raise error

    monkeypatch.setattr(step_module.Step, "_gradients", greedy)
    with pytest.raises(OutOfMemory, match=r"out of memory on cpu at 4 x 32 tokens.*budget.accumulate=2.*; ") as found:
        trained(small_run(), tmp_path)
    assert "\n" not in str(found.value)
    assert f"{asked}); try " in str(found.value)
    assert found.value.exit_code == 9


def test_a_batch_without_targets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RecallSource.train_batch

    def blank(self: Any, **how: Any) -> Any:
        batch = honest(self, **how)
        batch["targets"][:] = -100
        return batch

    monkeypatch.setattr(RecallSource, "train_batch", blank)
    with pytest.raises(oelm.OelmError, match="no target"):
        trained(small_run(), tmp_path)


@pytest.mark.parametrize("device", ["cuda", "tpu", "cuda:99", "mps"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(oelm.OelmError, match=device):
        trained(small_run(), tmp_path, device=device)


def test_a_warmup_longer_than_the_epochs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warmup: 100 steps are more than the budget's 16"):
        trained(small_run(budget={"epochs": 1.0, "batch": 4}, optimizer__warmup=100), tmp_path)


# -- thawing


def test_a_thaw_trains_what_was_frozen(tmp_path: Path) -> None:
    thaw = {"base": "oelm-freeze", "thaw": {"order": "top-down", "start": 6, "end": 14}}
    result = trained(small_run(variant=thaw), tmp_path)
    events = [line for line in lines(tmp_path) if line["kind"] == "event"]
    assert [(line["step"], line["event"]) for line in events] == [(6, "thaw"), (14, "thaw")]
    assert all("blocks.1" in name for name in events[0]["parameters"])
    assert all("blocks.0" in name for name in events[1]["parameters"])
    assert result["params"]["frozen"] == 0
    run = small_run(variant=thaw)
    model = build(run.model, vocab=RecallSource(run.data).vocab_size, seed=run.seed, context=32)
    oelm.apply(model, run.variant, seed=run.seed)
    start = dict(model.named_parameters())
    weights, _ = load_weights(tmp_path, "latest")
    moved = {name for event in events for name in event["parameters"] if not torch.equal(weights[name], start[name])}
    assert moved == {name for event in events for name in event["parameters"]}


def test_evaluations_of_one_run_read_the_same_text_and_the_record_the_whole_split(tmp_path: Path) -> None:
    run = small_run(data={"name": "demo", "tokenizer": "demo-bpe", "context": 32}, eval_tokens=256)
    result = train(run, tmp_path, progress="none")
    metrics = result["metrics"]
    assert metrics["best"]["loss"] == min(loss for _, loss in result["curve"]) == result["curve"][-1][1]
    assert (metrics["best"]["tokens"], metrics["best"]["step"]) == (256, 24)
    assert metrics["validation"]["tokens"] > 256
    assert metrics["validation"]["loss"] != metrics["best"]["loss"]
