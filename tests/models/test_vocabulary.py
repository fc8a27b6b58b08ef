"""The chunked loss against its plain definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.models import vocabulary
from oelm.models.vocabulary import plain_vocabulary_loss, vocabulary_loss


def problem(rows: int, width: int, vocab: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = -100
    return hidden, weight, targets


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), vocab=st.integers(2, 60), chunk=st.integers(1, 600), seed=st.integers(0, 10**6))
def test_chunked_equals_plain(rows: int, vocab: int, chunk: int, seed: int) -> None:
    hidden, weight, targets = problem(rows, 8, vocab, seed, torch.float32)
    expected = plain_vocabulary_loss(hidden, weight, targets)
    wanted = torch.autograd.grad(3.0 * expected, (hidden, weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_LOGITS", chunk)
        found = vocabulary_loss(hidden, weight, targets)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    for a, b in zip(torch.autograd.grad(3.0 * found, (hidden, weight)), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_is_as_near_to_float64_as_the_plain_form(autocast: bool) -> None:
    start = torch.float32 if autocast else torch.bfloat16
    hidden, weight, targets = problem(300, 16, 200, 0, start)
    exact = plain_vocabulary_loss(hidden.double(), weight.double(), targets)
    truth = torch.autograd.grad(exact, (hidden, weight))

    def faults(function) -> list[float]:  # type: ignore[no-untyped-def]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            nats = function(hidden, weight, targets)
        grads = torch.autograd.grad(nats, (hidden, weight))
        assert all(grad.dtype == start for grad in grads)
        return [
            abs(float(nats.detach() - exact.detach())),
            *(float((a - b).norm()) for a, b in zip(grads, truth, strict=True)),
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_LOGITS", 7000)
        chunked = faults(vocabulary_loss)
    plain = faults(plain_vocabulary_loss)
    assert all(ours <= 1.5 * theirs + 1e-2 for ours, theirs in zip(chunked, plain, strict=True)), (chunked, plain)


@pytest.mark.parametrize(("hidden_trains", "weight_trains"), [(True, False), (False, True), (False, False)])
def test_only_what_trains_gets_a_gradient(hidden_trains: bool, weight_trains: bool) -> None:
    hidden, weight, targets = problem(9, 4, 11, 3, torch.float32)
    expected = plain_vocabulary_loss(hidden, weight, targets)
    hidden.requires_grad_(hidden_trains)
    weight.requires_grad_(weight_trains)
    found = vocabulary_loss(hidden, weight, targets)
    assert found.requires_grad == (hidden_trains or weight_trains)
    assert torch.allclose(found, expected)


def test_no_target_at_all_is_a_loss_of_nothing() -> None:
    hidden, weight, _ = problem(5, 4, 11, 3, torch.float32)
    found = vocabulary_loss(hidden, weight, torch.full((5,), -100))
    assert found.item() == 0
    found.backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_it_compiles_as_one_graph() -> None:
    hidden, weight, targets = problem(20, 8, 30, 1, torch.float32)
    expected = torch.autograd.grad(plain_vocabulary_loss(hidden, weight, targets), (hidden, weight))
    compiled = torch.compile(vocabulary_loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(hidden, weight, targets), (hidden, weight)), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
