"""Schedules by their closed forms, optimisers against torch's own, groups by what they hold."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import small_run

import oelm
from oelm.errors import CheckpointError, ConfigError
from oelm.models.build import build
from oelm.train.optim import Optimizers, schedule, total_steps, warmup_steps
from oelm.train.run import Budget, Optimizer


CPU = torch.device("cpu")


def model_of(variant: object = "oelm-freeze") -> torch.nn.Module:
    run = small_run(variant=variant)
    model = build(run.model, vocab=33, seed=1)
    oelm.apply(model, run.variant, seed=1)
    return model


def test_cosine_is_the_cosine() -> None:
    factor = schedule(Optimizer(warmup=10, floor=0.1), 110)
    assert [factor(n) for n in range(10)] == pytest.approx([(n + 1) / 10 for n in range(10)])
    for n in range(10, 110):
        assert factor(n) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (n - 10) / 100)) / 2)


def test_linear_constant_and_wsd() -> None:
    assert [schedule(Optimizer(schedule="linear"), 4)(n) for n in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert {schedule(Optimizer(schedule="constant"), 9)(n) for n in range(9)} == {1.0}
    wsd = schedule(Optimizer(schedule="wsd", cooldown=0.25), 8)
    assert [wsd(n) for n in range(8)] == [1.0] * 7 + [0.5]


@given(
    kind=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    total=st.integers(1, 5000),
    warmup=st.floats(0, 1),
    floor=st.floats(0, 1),
    cooldown=st.floats(0, 1),
)
def test_every_schedule_stays_in_bounds_and_falls_after_warmup(
    kind: str, total: int, warmup: float, floor: float, cooldown: float
) -> None:
    settings = Optimizer(schedule=kind, warmup=warmup, floor=floor, cooldown=cooldown)  # type: ignore[arg-type]
    factor, rise = schedule(settings, total), warmup_steps(settings, total)
    values = [factor(n) for n in range(total)]
    assert all(0 <= v <= 1 + 1e-12 for v in values)
    assert all(v >= floor - 1e-12 for v in values[rise:])
    assert all(a <= b + 1e-12 for a, b in pairwise(values[:rise]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[rise:]))
    assert values[0] > 0 or kind != "constant"


def test_what_a_budget_buys() -> None:
    assert total_steps(Budget(steps=7), steps_per_epoch=100, tokens_per_step=5) == 7
    assert total_steps(Budget(epochs=1.5), steps_per_epoch=11, tokens_per_step=5) == 17
    assert total_steps(Budget(epochs=3.0), steps_per_epoch=11, tokens_per_step=5) == 33
    assert total_steps(Budget(tokens=101), steps_per_epoch=11, tokens_per_step=10) == 11


def test_a_warmup_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="11 steps are more than the budget's 10"):
        schedule(Optimizer(warmup=11), 10)


def test_frozen_for_good_is_never_in_and_what_thaws_always_is() -> None:
    for variant, frozen_in in (("oelm-freeze", False), ({"base": "progressive"}, True)):
        model = model_of(variant)
        held = {id(p) for p in Optimizers(model, Optimizer(), CPU).params}
        for name, parameter in model.named_parameters():
            assert (id(parameter) in held) == (parameter.requires_grad or frozen_in), name


def test_adamw_and_its_decay_are_torchs() -> None:
    mine, theirs = model_of(), model_of()
    optimizers = Optimizers(mine, Optimizer(lr=1e-2, weight_decay=0.1, decay="all"), CPU)
    reference = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for number in range(3):
        for model in (mine, theirs):
            for index, parameter in enumerate(model.parameters()):
                if parameter.requires_grad:
                    generator = torch.Generator().manual_seed(100 * number + index)
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizers.set_rate(1.0)
        optimizers.step()
        reference.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_decay_of_matrices_alone() -> None:
    [optimizer] = Optimizers(model_of(), Optimizer(weight_decay=0.1, decay="matrices"), CPU).each
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0)


def test_layer_decay_scales_the_rates() -> None:
    model = model_of()
    optimizers = Optimizers(model, Optimizer(lr=1.0, layer_decay=0.5), CPU)
    optimizers.set_rate(0.1)
    rates = {
        name: group["lr"]
        for group in optimizers.each[0].param_groups
        for name, p in model.named_parameters()
        if any(p is q for q in group["params"])
    }
    assert rates["blocks.1.mlp.up.weight"] == pytest.approx(0.1 * 0.5)
    assert rates["blocks.0.mlp.up.weight"] == pytest.approx(0.1 * 0.25)
    assert rates["norm.weight"] == pytest.approx(0.1)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = model_of()
    adamw, muon = Optimizers(model, Optimizer(name="muon"), CPU).each
    names = {id(p): name for name, p in model.named_parameters()}
    held = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert type(muon) is torch.optim.Muon
    assert held
    assert all(name.startswith("blocks.") and name.endswith("weight") and "norm" not in name for name in held)
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert "embed.weight" in rest
    assert held | rest == {name for name, p in model.named_parameters() if p.requires_grad}


def test_muons_update_is_orthogonal() -> None:
    model = model_of()
    optimizers = Optimizers(model, Optimizer(name="muon", lr=1.0, weight_decay=0.0), CPU)
    weight = dict(model.named_parameters())["blocks.0.mlp.up.weight"]
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    optimizers.step()
    values = torch.linalg.svdvals(before - weight.detach())
    assert float(values.max() / values.min()) < 2.5


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_by_name_survives_the_round_trip(name: str) -> None:
    model = model_of()
    optimizers = Optimizers(model, Optimizer(name=name), CPU)  # type: ignore[arg-type]
    for parameter in optimizers.params:
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    saved = {key: value.clone() for key, value in optimizers.tensors().items()}
    again = Optimizers(model, Optimizer(name=name), CPU)  # type: ignore[arg-type]
    again.load(saved)
    assert {k: v.tolist() for k, v in again.tensors().items()} == {k: v.tolist() for k, v in saved.items()}
    with pytest.raises(CheckpointError, match=r"of 'stranger.weight' belongs to no parameter"):
        again.load({"stranger.weight|exp_avg": torch.zeros(1)})
