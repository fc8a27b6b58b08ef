"""The fused projection against three plain ones: values, gradients, and no work for what is frozen."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from oelm.models.attention import Attention, Reading, fused_projections
from oelm.models.gpt import GPT
from oelm.models.shapes import Shape


SHAPE = Shape(width=24, layers=2, heads=4, kv_heads=2, hidden=48, vocab=50, context=16, dropout=0.0, qkv_bias=True)


def one_pass(attention: Attention, *, fused: bool, dtype: torch.dtype | None = None) -> list[torch.Tensor | None]:
    attention.fused = fused
    attention.zero_grad()
    weight = attention.v.weight.dtype
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(weight)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = attention(x, Reading(None, None, True, None))
    out.float().pow(2).sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in attention.parameters())]


@pytest.mark.parametrize("trains", list(itertools.product([True, False], repeat=3)))
def test_fused_equals_plain_forward_and_backward_whatever_is_frozen(trains: tuple[bool, ...]) -> None:
    attention = Attention(SHAPE).double()
    for linear, train in zip((attention.q, attention.k, attention.v), trains, strict=True):
        linear.requires_grad_(train)
    for plain, fused in zip(one_pass(attention, fused=False), one_pass(attention, fused=True), strict=True):
        assert (plain is None) == (fused is None)
        if plain is not None and fused is not None:
            assert torch.allclose(plain, fused, rtol=0, atol=1e-12)


@pytest.mark.parametrize("autocast", [True, False])
def test_fused_equals_plain_in_bfloat16(autocast: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(SHAPE)
    attention.q.requires_grad_(False)
    if not autocast:
        attention.bfloat16()
    kind = torch.bfloat16 if autocast else None
    plain, fused = one_pass(attention, fused=False, dtype=kind), one_pass(attention, fused=True, dtype=kind)
    pairs = [(a, b) for a, b in zip(plain, fused, strict=True) if a is not None and b is not None]
    assert len(pairs) == len([a for a in plain if a is not None]) > 6
    assert all(a.dtype == b.dtype for a, b in pairs)
    one, two = (torch.cat([pair[i].flatten().double() for pair in pairs]) for i in (0, 1))
    assert (one - two).norm() < 0.01 * one.norm()


class _Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts multiply-adds of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.mm.default:
            self.calls += 1
            self.count += args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "saved", "calls"), [("", 0, 3), ("q", 24, 3), ("k", 12, 4), ("qk", 36, 3), ("qkv", 48, 2)]
)
def test_a_frozen_projection_costs_no_weight_gradient(frozen: str, saved: int, calls: int) -> None:
    linears = {name: nn.Linear(24, rows, bias=False) for name, rows in (("q", 24), ("k", 12), ("v", 12))}
    for name in frozen:
        linears[name].requires_grad_(False)
    x = torch.randn(10, 24, requires_grad=True)
    with _Products() as products:
        total = sum(part.sum() for part in fused_projections(x, list(linears.values())))
        total.backward()
    assert products.count == 10 * 24 * (3 * 48 - saved)
    assert products.calls == calls  # one forward, one for the input, one for each run of neighbours that train


def test_matrices_that_lie_above_each_other_already_give_the_same() -> None:
    attention = Attention(SHAPE).double()
    attention.q.requires_grad_(False)
    plain = one_pass(attention, fused=True)
    attention.stacked = torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]).detach()
    lent = one_pass(attention, fused=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, lent, strict=True))
    attention.stacked.zero_()
    assert not torch.equal(one_pass(attention, fused=True)[0], plain[0])


def test_tied_projections_are_multiplied_once() -> None:
    q, k, v = (nn.Linear(24, 24, bias=False) for _ in range(3))
    k.weight = q.weight
    x = torch.randn(10, 24, requires_grad=True)
    with _Products() as products:
        found = fused_projections(x, [q, k, v])
        torch.stack(found).square().sum().backward()
    assert products.count == 10 * 24 * 3 * 48
    expected = torch.autograd.grad(sum(linear(x).square().sum() for linear in (q, k, v)), q.weight)[0]
    assert torch.allclose(q.weight.grad, expected, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_compiles_with_frozen_projections_and_gives_the_same_gradient(tied: bool) -> None:
    model = GPT(SHAPE.changed(kv_heads=None), seed=1)
    for block in model.blocks:
        if tied:
            block.attn.k.weight = block.attn.q.weight
        for parameter in (*block.attn.q.parameters(), *block.attn.k.parameters()):
            parameter.requires_grad_(False)
    inputs = torch.arange(20).view(2, 10)

    def grads(run) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
        model.zero_grad()
        model.logits(run(inputs)).logsumexp(-1).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    eager = grads(model)
    compiled = grads(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert eager.keys() == compiled.keys()
    assert not any(".q." in name or ".k." in name for name in eager)
    assert all(torch.allclose(eager[name], compiled[name], atol=1e-6) for name in eager)


def test_a_replaced_or_hooked_projection_is_called_as_a_module() -> None:
    class Slices(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    attention = Attention(SHAPE.changed(kv_heads=None))
    x = torch.randn(1, 5, 24)
    seen: list[torch.Size] = []
    handle = attention.q.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    attention.project(x)
    assert seen == [torch.Size([1, 5, 24])]
    handle.remove()
    attention.q = Slices()  # type: ignore[assignment]
    q, _, _ = attention.project(x)
    assert torch.equal(q.flatten(-2), x * 2)


def test_tied_projections_share_one_gradient() -> None:
    attention = Attention(SHAPE.changed(kv_heads=None, qkv_bias=False)).double()
    attention.k.weight = attention.q.weight
    for plain, fused in zip(one_pass(attention, fused=False), one_pass(attention, fused=True), strict=True):
        assert plain is not None
        assert fused is not None
        assert torch.allclose(plain, fused, rtol=0, atol=1e-12)
