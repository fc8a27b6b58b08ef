"""Thaw schedules and parameter groups."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zoo import CASES

import oelm
from oelm.errors import ConfigError, MethodError
from oelm.method.variant import changed
from oelm.models.gpt import GPT
from oelm.models.shapes import Shape


def gpt(variant: oelm.Variant | str, layers: int = 3) -> GPT:
    model = GPT(Shape(width=32, layers=layers, heads=4, hidden=48, vocab=50, context=16, dropout=0.0))
    oelm.apply(model, variant)
    return model


def thawing(order: str = "top-down", start: float = 10, end: float = 20, **more: object) -> oelm.Variant:
    return oelm.Variant(thaw=oelm.Thaw(order=order, start=start, end=end), **more)


def training(model: nn.Module) -> set[int]:
    return {i for i, block in enumerate(model.blocks) if block.attn.q.weight.requires_grad}


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("top-down", {9: set(), 10: {2}, 14: {2}, 15: {1, 2}, 19: {1, 2}, 20: {0, 1, 2}, 99: {0, 1, 2}}),
        ("bottom-up", {9: set(), 10: {0}, 15: {0, 1}, 20: {0, 1, 2}}),
        ("at-once", {9: set(), 10: {0, 1, 2}, 20: {0, 1, 2}}),
    ],
)
def test_layers_thaw_in_order(order: str, steps: dict[int, set[int]]) -> None:
    model = gpt(thawing(order))
    plan = oelm.schedule(model)
    for step, expected in steps.items():
        changed_names = plan.step(step)
        assert training(model) == expected
        assert plan.step(step) == []
        assert all(name.endswith(("q.weight", "k.weight")) for name in changed_names)
    assert sorted(plan.due(99)) == sorted(name for names in plan.boundaries().values() for name in names)


def test_fractions_are_of_the_budget_and_need_one() -> None:
    model = gpt(oelm.variants()["progressive"])
    with pytest.raises(ConfigError, match="give total_steps"):
        oelm.schedule(model)
    assert list(oelm.schedule(model, 100).boundaries()) == [25, 50, 75]
    assert oelm.schedule(model, 100).boundaries()[25] == ["blocks.2.attn.q.weight", "blocks.2.attn.k.weight"]
    for wrong in (0, -1, True):
        with pytest.raises(ConfigError, match="total_steps"):
            oelm.schedule(model, wrong)


@settings(max_examples=20, deadline=None)
@given(visited=st.lists(st.integers(0, 30), max_size=5), last=st.integers(0, 30))
def test_what_trains_is_a_function_of_the_step_alone(visited: list[int], last: int) -> None:
    """A resumed run, which starts at any step, is right at once; so is one that goes back."""
    model = gpt(thawing())
    straight = copy.deepcopy(model)
    oelm.schedule(straight).step(last)
    plan = oelm.schedule(model)
    for step in (*visited, last):
        plan.step(step)
    assert training(model) == training(straight)


def test_a_thaw_resets_dynamo_and_only_a_thaw_does(monkeypatch: pytest.MonkeyPatch) -> None:
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    plan = oelm.schedule(gpt(thawing()))
    for step in range(30):
        plan.step(step)
    assert len(resets) == 3


def test_a_schedule_needs_a_converted_model_and_may_be_empty() -> None:
    with pytest.raises(MethodError, match="not converted"):
        oelm.schedule(nn.Linear(2, 2))
    plan = oelm.schedule(gpt("oelm-freeze"))
    assert plan.boundaries() == {}
    assert plan.step(10**6) == []
    for step in ("3", 1.5, True, None):
        with pytest.raises(ConfigError, match="whole number"):
            plan.step(step)
    for total in ("100", 0, 99.5, True):
        with pytest.raises(ConfigError, match="total_steps"):
            oelm.schedule(gpt("progressive"), total)


def test_biases_thaw_with_their_matrices() -> None:
    model = CASES["gpt2"].build()
    oelm.apply(model, thawing())
    names = oelm.schedule(model).boundaries()[10]
    assert sorted(n.rpartition("c_attn.")[2] for n in names) == ["k.bias", "k.weight", "q.bias", "q.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_compiled_model_trains_what_thawed(backend: str) -> None:
    torch._dynamo.reset()
    model = gpt(thawing("top-down", 2, 4))
    compiled = torch.compile(model, backend=backend)
    plan = oelm.schedule(compiled)
    x = torch.randint(50, (2, 8))
    for step in range(6):
        plan.step(step)
        model.zero_grad()
        model.logits(compiled(x)).square().mean().backward()
        found = {i for i, block in enumerate(model.blocks) if block.attn.q.weight.grad is not None}
        assert found == training(model)


# Parameter groups


def held(groups: list[dict[str, object]]) -> list[int]:
    return [id(p) for group in groups for p in group["params"]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name",
    ["gpt", "gpt2", "t5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "llama", "albert", "vit"))],
)
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_groups_hold_what_trains_or_will_thaw_once_and_nothing_else(name: str, decay: float) -> None:
    for variant in ("oelm-freeze", "progressive", "baseline"):
        model = CASES[name].build()
        oelm.apply(model, variant)
        groups = oelm.param_groups(model, lr=1e-3, layer_decay=decay)
        trains = {id(p) for p in model.parameters() if p.requires_grad or variant == "progressive"}
        assert sorted(held(groups)) == sorted(trains)
        optimizer = torch.optim.AdamW(groups)
        oelm.verify(model, optimizer) if variant != "baseline" else None


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_rates_fall_with_depth(name: str) -> None:
    model = CASES[name].build()
    oelm.apply(model, "baseline")
    rates = {}
    for group in oelm.param_groups(model, lr=1.0, layer_decay=0.5):
        rates.update({id(p): group["lr"] for p in group["params"]})
    rate = {n: rates[id(p)] for n, p in model.named_parameters()}
    if name == "gpt":
        assert [rate[f"blocks.{i}.attn.q.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
        assert rate["embed.weight"] == rate["position.weight"] == 0.0625
        assert rate["norm.weight"] == 1.0
    if name == "bert":
        assert [rate[f"bert.encoder.layer.{i}.output.dense.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
        assert rate["bert.embeddings.LayerNorm.weight"] == 0.0625
        assert rate["classifier.weight"] == rate["bert.pooler.dense.weight"] == 1.0
    if name == "t5":  # each stack counts its own layers: three in the encoder, two in the decoder
        assert rate["encoder.block.2.layer.0.SelfAttention.q.weight"] == 0.5
        assert rate["decoder.block.1.layer.1.EncDecAttention.q.weight"] == 0.5
        assert rate["encoder.block.0.layer.0.SelfAttention.q.weight"] == 0.125
        assert rate["decoder.block.0.layer.0.SelfAttention.q.weight"] == 0.25
        assert rate["shared.weight"] == 0.0625
        assert rate["decoder.final_layer_norm.weight"] == 1.0


def test_vectors_and_addons_do_not_decay_unless_asked() -> None:
    model = gpt(changed(oelm.variants()["tied-shift"], addons=("shift-keys", "channel-gain")))
    decay = {}
    for group in oelm.param_groups(model, lr=1.0, weight_decay=0.3):
        decay.update({id(p): group["weight_decay"] for p in group["params"]})
    for name, parameter in model.named_parameters():
        if id(parameter) in decay:
            assert decay[id(parameter)] == (0.0 if parameter.ndim < 2 or ".addons." in name else 0.3)
    everything = oelm.param_groups(model, lr=1.0, weight_decay=0.3, no_decay=lambda name, p: False)
    spared = {id(p) for g in everything if g["weight_decay"] == 0 for p in g["params"]}
    assert spared == {id(p) for n, p in model.named_parameters() if ".addons." in n}


def test_a_frozen_for_good_weight_never_moves_under_adamw() -> None:
    model = gpt("oelm-freeze")
    before = model.blocks[0].attn.q.weight.clone()
    optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=0.1, weight_decay=0.5))
    for _ in range(3):
        model.logits(model(torch.randint(50, (2, 8)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.blocks[0].attn.q.weight, before)
    oelm.verify(model, optimizer)


def test_a_thawing_weight_has_no_state_and_no_decay_before_its_time() -> None:
    model = gpt(thawing("at-once", 2, 2))
    plan, weight = oelm.schedule(model), model.blocks[0].attn.q.weight
    optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=0.1, weight_decay=0.5))
    before = weight.clone()
    for step in range(4):
        plan.step(step)
        model.logits(model(torch.randint(50, (2, 8)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (weight in optimizer.state) == (step >= 2)
        assert torch.equal(weight, before) == (step < 2)
    oelm.verify(model, optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": 1.0, "layer_decay": 1.5}, "layer_decay"),
        ({"lr": 1.0, "layer_decay": -1.0}, "layer_decay"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_impossible_rates_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        oelm.param_groups(gpt("oelm-freeze"), **arguments)


def test_groups_of_an_unconverted_model_and_of_nothing() -> None:
    model = nn.Linear(3, 2)
    assert sorted(held(oelm.param_groups(model, lr=1.0))) == sorted(id(p) for p in model.parameters())
    with pytest.raises(MethodError, match="nothing trains"):
        oelm.param_groups(model.requires_grad_(False), lr=1.0)
    with pytest.raises(MethodError, match="no attention"):
        oelm.param_groups(model.requires_grad_(True), lr=1.0, layer_decay=0.9)
