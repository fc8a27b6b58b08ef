"""Losses against their definitions, evaluation against one pass over everything, and each task learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oelm
from oelm.data.recall import RecallSource
from oelm.data.spec import DataSpec
from oelm.errors import ConfigError, DataError
from oelm.models.build import build
from oelm.models.shapes import PRESETS, Shape
from oelm.train.objectives import OBJECTIVES, bare, objective_for, to_device


VOCAB, LABELS, EXAMPLES, LENGTH = 50, 4, 22, 12
BASE = Shape(width=32, layers=2, heads=4, hidden=64, vocab=VOCAB, context=16, dropout=0.0, labels=LABELS)
SHAPES = {
    "lm": BASE,
    "classify": BASE.changed(head="classify", causal=False),
    "tag": BASE.changed(head="tag", causal=False),
    "qa": BASE.changed(head="qa", causal=False),
}


class Made:
    """A source of random examples of every kind, whose score counts what it is given."""

    name = "made"

    def __init__(self, kind: str, examples: int = EXAMPLES) -> None:
        self.kind = kind
        random = np.random.default_rng(3)
        lengths = random.integers(4, LENGTH + 1, examples)
        mask = np.arange(LENGTH)[None] < lengths[:, None]
        inputs = np.where(mask, random.integers(1, VOCAB, (examples, LENGTH)), 0)
        self.all: dict[str, Any] = {"inputs": inputs, "mask": mask, "index": np.arange(examples)}
        if kind == "lm":
            targets = np.where(mask, random.integers(1, VOCAB, (examples, LENGTH)), -100)
            self.all = {"inputs": inputs, "targets": targets}
        elif kind == "classify":
            self.all |= {"labels": random.integers(0, LABELS, examples), "last": lengths - 1}
        elif kind == "tag":
            drawn = random.integers(0, LABELS, (examples, LENGTH))
            self.all["labels"] = np.where(mask & (random.random((examples, LENGTH)) < 0.6), drawn, -100)
        else:
            start = random.integers(0, lengths)
            absent = random.random(examples) < 0.2
            self.all["start"] = np.where(absent, -100, start)
            self.all["end"] = np.where(absent, -100, np.minimum(start + 1, lengths - 1))

    def eval_batches(self, split: str, batch: int) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self.all["inputs"]), batch):
            yield {name: value[start : start + batch] for name, value in self.all.items()}

    def score(self, split: str, outputs: Any) -> dict[str, Any]:
        if self.kind == "lm":
            return {"bits_per_byte": outputs[0] / outputs[1], "tokenizer": "none", "tokens": outputs[1]}
        seen = np.concatenate([np.asarray(output[0]) for output in outputs])
        said = np.concatenate([np.asarray(output[1]) for output in outputs])
        return {
            "examples": len(seen),
            "f1": float(np.maximum(said, 0).sum()),
            "per_example": {},
            "order": seen.tolist(),
        }


def reference(kind: str, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> float:
    """The mean loss in float64, one target at a time."""
    logs = logits.double().log_softmax(1 if kind == "qa" else -1)
    found = []
    for row in range(len(logits)):
        if kind == "classify":
            found.append(-logs[row, batch["labels"][row]])
        elif kind == "qa":
            length = int(batch["mask"][row].sum())
            inside = logits[row, :length].double().log_softmax(0)
            if batch["start"][row] >= 0:
                found.append(-(inside[batch["start"][row], 0] + inside[batch["end"][row], 1]) / 2)
        else:
            labels = batch["targets" if kind == "lm" else "labels"][row]
            found += [-logs[row, place, label] for place, label in enumerate(labels) if label >= 0]
    return float(torch.stack(found).mean())


@pytest.mark.parametrize("kind", list(SHAPES))
def test_the_loss_is_the_mean_over_targets(kind: str) -> None:
    source = Made(kind)
    model = build(SHAPES[kind], seed=1)
    objective = objective_for(SHAPES[kind], source)
    batch = to_device(source.all, "cpu")
    loss, sums = objective.loss(model, batch)
    logits = model.logits(model(**{n: v for n, v in batch.items() if n in ("inputs", "mask", "last")}))
    assert loss.item() == pytest.approx(reference(kind, logits.detach(), batch), rel=1e-5)
    assert loss.item() == pytest.approx(float(sums["nats"] / sums["count"]))
    assert loss.requires_grad
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize("kind", list(SHAPES))
def test_evaluation_weighs_every_target_alike_whatever_the_batch(kind: str) -> None:
    source = Made(kind)
    model = build(SHAPES[kind], seed=1)
    objective = objective_for(SHAPES[kind], source)
    whole, _ = objective.loss(model, to_device(source.all, "cpu"))
    found = [objective.evaluate(model, source, "validation", device="cpu", batch=batch) for batch in (1, 5, EXAMPLES)]
    for metrics in found:
        assert metrics["loss"] == pytest.approx(whole.item(), rel=1e-5)
        assert metrics.keys() == found[0].keys()
        assert all(isinstance(value, int | float) for value in metrics.values())
    for name in {"f1", "accuracy", "bits_per_byte"} & found[0].keys():
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)


def test_metrics_of_each_kind() -> None:
    def metrics(kind: str) -> dict[str, Any]:
        source = Made(kind)
        objective = objective_for(SHAPES[kind], source)
        return objective.evaluate(build(SHAPES[kind], seed=1), source, "validation", device="cpu", batch=4)

    language = metrics("lm")
    assert language["perplexity"] == pytest.approx(np.exp(language["loss"]))
    assert language["tokens"] == int((Made("lm").all["targets"] >= 0).sum())
    assert language["bits_per_byte"] == pytest.approx(language["loss"])
    assert metrics("classify").keys() >= {"loss", "accuracy", "examples", "f1"}
    assert metrics("tag").keys() >= {"loss", "f1"}
    assert metrics("qa").keys() >= {"loss", "f1"}


def test_accuracy_counts_right_labels() -> None:
    source = Made("classify")
    model = build(SHAPES["classify"], seed=1)
    objective = objective_for(SHAPES["classify"], source)
    batch = to_device(source.all, "cpu")
    index, said = objective.predict(model, batch)
    assert torch.equal(index, batch["index"])
    metrics = objective.evaluate(model, source, "test", device="cpu", batch=7)
    assert metrics["accuracy"] == pytest.approx(float((said == batch["labels"]).float().mean()))


def test_evaluation_has_no_dropout_no_gradient_and_restores_the_mode() -> None:
    shape = SHAPES["lm"].changed(dropout=0.5)
    model, source = build(shape, seed=1), Made("lm")
    model.train()
    objective = objective_for(shape, source)
    one, two = (objective.evaluate(model, source, "validation", device="cpu", batch=4) for _ in range(2))
    assert one == two
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ZeroDivisionError):
        objective.evaluate(model, _Broken("lm"), "validation", device="cpu", batch=4)
    assert model.training


class _Broken(Made):
    def eval_batches(self, split: str, batch: int) -> Iterator[dict[str, Any]]:
        yield from super().eval_batches(split, batch)
        raise ZeroDivisionError


def test_a_limit_reads_the_first_batches_only() -> None:
    source = Made("lm")
    objective = objective_for(BASE, source)
    model = build(BASE, seed=1)
    part = objective.evaluate(model, source, "validation", device="cpu", batch=2, limit=2 * LENGTH + 1)
    assert part["tokens"] == int((source.all["targets"][:4] >= 0).sum())


@pytest.mark.parametrize("kind", list(SHAPES))
def test_eight_examples_are_learned_by_heart(kind: str) -> None:
    source = Made(kind, examples=8)
    model = build(SHAPES[kind], seed=1)
    objective = objective_for(SHAPES[kind], source)
    batch = to_device(source.all, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(120):
        loss, _ = objective.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    if kind == "tag":
        _, said = objective.predict(model, batch)
        assert ((said == batch["labels"]) | (batch["labels"] == -100)).all()
    if kind == "qa":
        _, start, _ = objective.predict(model, batch)
        known = batch["start"] >= 0
        assert torch.equal(start.argmax(-1)[known], batch["start"][known])


def test_answers_are_never_in_the_padding() -> None:
    source = Made("qa")
    objective = objective_for(SHAPES["qa"], source)
    _, start, end = objective.predict(build(SHAPES["qa"], seed=1), to_device(source.all, "cpu"))
    for logits in (start, end):
        assert logits[~torch.from_numpy(source.all["mask"])].isneginf().all()
        assert logits[torch.from_numpy(source.all["mask"])].isfinite().all()


def test_recall_is_judged_by_accuracy_at_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oelm.data.recall.HELD_OUT_EXAMPLES", 40)
    source = RecallSource(DataSpec(name="recall", context=32, pairs=4, symbols=32))
    shape = BASE.changed(context=32)
    model = build(shape, vocab=source.vocab_size, seed=1)
    objective = objective_for(shape, source)
    batch = to_device(source.train_batch(seed=0, step=0, batch=8), "cpu")
    loss, sums = objective.loss(model, batch)
    logits = model.logits(model(batch["inputs"]))
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).item(), rel=1e-5
    )
    assert int(sums["count"]) == int((batch["targets"] >= 0).sum())
    found = objective.evaluate(model, source, "validation", device="cpu", batch=16)
    assert 0 <= found["accuracy"] < 0.3
    assert found["examples"] == 40


def test_a_head_that_does_not_fit_the_task_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"model\.head = 'lm' does not fit data 'made'.*'classify'"):
        objective_for(BASE, Made("classify"))
    source = Made("lm")
    source.kind = "lmm"
    with pytest.raises(ConfigError, match="did you mean 'lm'"):
        objective_for(BASE, source)
    assert set(OBJECTIVES) == {"lm", "classify", "tag", "qa", "recall"}


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to evaluate"):
        objective_for(BASE, Made("lm")).evaluate(
            build(BASE), Made("lm", examples=0), "validation", device="cpu", batch=4
        )


def test_wrappers_are_looked_through() -> None:
    model = build(BASE)
    assert bare(model) is model
    compiled = torch.compile(model, backend="eager")
    assert bare(compiled) is model
    loss, _ = objective_for(BASE, Made("lm")).loss(compiled, to_device(Made("lm").all, "cpu"))
    plain, _ = objective_for(BASE, Made("lm")).loss(model, to_device(Made("lm").all, "cpu"))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)


# Loss and gradient norm at the first two steps. They move when initialisation, the model, a variant or the loss does:
# if that was not meant, it is a fault; if it was, write the new numbers and say so in the changelog.
GOLDEN = {
    "baseline": (6.93595, 1.48206, 6.42620, 2.17353),
    "oelm-freeze": (6.94426, 1.54033, 6.41889, 2.13417),
    "tied-shift": (6.94594, 1.50849, 6.42684, 1.91519),
    "slices-shift": (6.94482, 1.51375, 6.41733, 1.81020),
}


@pytest.mark.parametrize("variant", list(GOLDEN))
def test_the_first_two_steps_have_golden_numbers(variant: str) -> None:
    model = build(PRESETS["gpt-tiny"], seed=0)
    oelm.apply(model, variant, seed=0)
    ids = (torch.arange(4 * 33) * 7919 % 1024).view(4, 33)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    objective = objective_for(PRESETS["gpt-tiny"], Made("lm"))
    training = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(training, lr=1e-2)
    found: list[float] = []
    for _ in range(2):
        loss, _ = objective.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        found += [loss.item(), torch.nn.utils.get_total_norm([p.grad for p in training]).item()]
        optimizer.step()
    assert found == pytest.approx(GOLDEN[variant], rel=2e-4)
