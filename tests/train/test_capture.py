"""The captured step against the plain one, and the fused vocabulary loss against its definition. Needs a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oelm
from oelm.models.build import build
from oelm.models.shapes import Shape
from oelm.models.vocabulary import plain_vocabulary_loss, vocabulary_loss
from oelm.train.objectives import objective_for
from oelm.train.optim import Optimizers
from oelm.train.parallel import World
from oelm.train.run import Optimizer
from oelm.train.step import Step, make_step


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = Shape(width=128, layers=2, heads=4, hidden=512, vocab=1003, context=64, dropout=0.0)


class Tokens:
    """Text whose next token is a fixed function of the last one: learnable at once."""

    kind, name = "lm", "made"

    def batch(self, number: int, rows: int = 16) -> dict[str, np.ndarray]:
        start = np.random.default_rng(number).integers(0, SHAPE.vocab, (rows, 1))
        tokens = (start * 7 + 13 * np.arange(SHAPE.context + 1)) % SHAPE.vocab
        targets = tokens[:, 1:].copy()
        targets[:, :3] = -100
        return {"inputs": tokens[:, :-1].copy(), "targets": targets}


def made(kind, variant: str, clip: float = 1.0, lr: float = 1e-3) -> Step:
    device = torch.device("cuda", 0)
    torch._dynamo.reset()
    model = build(SHAPE, vocab=SHAPE.vocab, labels=None, seed=3, context=SHAPE.context)
    oelm.apply(model, variant, seed=3)
    model.to(device).train()
    optimizers = Optimizers(model, Optimizer(lr=lr, weight_decay=0.1), device)
    return kind(
        model,
        objective_for(SHAPE, Tokens()),
        optimizers,
        device=device,
        precision="bf16",
        accumulate=1,
        clip=clip,
        world=World(device, "ddp"),
    )


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_vocabulary_nats_equal_their_definition_for_any_spread(spread):
    torch.manual_seed(1)
    hidden = torch.randn(200, 128, device="cuda", dtype=torch.bfloat16)
    weight = (spread * torch.randn(50257, 128, device="cuda")).to(torch.bfloat16)
    targets = torch.randint(0, 50257, (200,), device="cuda")
    ours = vocabulary_loss(hidden.requires_grad_(), weight, targets)
    exact = plain_vocabulary_loss(hidden.double(), weight.double(), targets)
    assert abs(ours.item() / exact.item() - 1) < 2e-3


def test_vocabulary_loss_equals_its_definition():
    torch.manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
    weight = 0.1 * torch.randn(1003, 128, device="cuda", dtype=torch.bfloat16)  # logits of size 1, not 11
    targets = torch.randint(0, 1003, (300,), device="cuda")
    targets[::7] = -100
    found = []
    for loss, precise in ((vocabulary_loss, False), (plain_vocabulary_loss, True)):
        h = (hidden.double() if precise else hidden).detach().requires_grad_()
        w = (weight.double() if precise else weight).detach().requires_grad_()
        value = loss(h, w, targets) * 0.37
        value.backward()
        found.append((value.double(), h.grad.double(), w.grad.double()))
    for ours, exact in zip(*found, strict=True):
        assert ((ours - exact).norm() / exact.norm()).item() < 6e-3


@pytest.mark.parametrize("variant", ["baseline", "oelm-freeze", "slices-shift", "tied-shift"])
def test_captured_equals_plain_over_fifty_steps(variant):
    tokens = Tokens()
    curves = []
    for kind in (make_step, Step):
        step = made(kind, variant)
        for number in range(50):
            step(number, tokens.batch(number), 1.0 - number / 100)
        look = step.look()
        assert look.bad_at is None
        curves.append((np.array(look.losses), np.array(look.norms)))
        oelm.verify(step.model)
    assert type(made(make_step, variant)).__name__ == "CapturedStep"
    (fast, fast_norm), (plain, plain_norm) = curves
    assert abs(fast[0] - plain[0]) < 2e-3
    np.testing.assert_allclose(fast, plain, rtol=0.03)
    np.testing.assert_allclose(fast_norm[:5], plain_norm[:5], rtol=0.03)
    assert plain[-1] < plain[0] - 0.5


def test_frozen_masters_do_not_move_and_others_do():
    step = made(make_step, "oelm-freeze")
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    for number in range(3):
        step(number, Tokens().batch(number), 1.0)
    step.look()
    for name, param in step.model.named_parameters():
        assert param.dtype == torch.float32
        frozen = ".attn.q." in name or ".attn.k." in name
        assert torch.equal(param, before[name]) == frozen, name


def test_a_bad_step_changes_nothing_and_is_named():
    step = made(make_step, "baseline")
    tokens = Tokens()
    step(0, tokens.batch(0), 1.0)
    step.look()
    before = [p.detach().clone() for p in step.model.parameters()]
    with torch.no_grad():
        kept = step.model.norm.bias[0].clone()
        step.model.norm.bias[0] = float("nan")
    step(1, tokens.batch(1), 1.0)
    look = step.look()
    assert look.bad_at == 1
    with torch.no_grad():
        step.model.norm.bias[0] = kept
    for old, new in zip(before, step.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_state_of_the_optimiser_continues_in_a_new_step():
    tokens = Tokens()
    whole = made(make_step, "baseline")
    for number in range(8):
        whole(number, tokens.batch(number), 1.0)
    whole.look()
    first = made(make_step, "baseline")
    for number in range(4):
        first(number, tokens.batch(number), 1.0)
    first.look()
    second = made(make_step, "baseline")
    second.model.load_state_dict(first.model.state_dict())
    second.optimizers.load({k: v.detach().cpu().clone() for k, v in first.optimizers.tensors().items()})
    second.load(first.tensors())
    second.thawed()
    for number in range(4, 8):
        second(number, tokens.batch(number), 1.0)
    second.look()
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_two_shapes_of_batch_share_one_state():
    step = made(make_step, "baseline")
    tokens = Tokens()
    for number in range(6):
        step(number, tokens.batch(number, rows=16 if number % 2 else 8), 1.0)
    look = step.look()
    assert look.bad_at is None
    assert len(look.losses) == 6
    counts = {int(v) for k, v in step.optimizers.tensors().items() if k.endswith("|step")}
    assert counts == {6}
