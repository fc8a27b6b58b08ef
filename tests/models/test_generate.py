"""Cached generation against the full pass, and sampling against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oelm.errors import ConfigError
from oelm.models.generate import Sampling, allowed, choose, generate
from oelm.models.gpt import GPT
from oelm.models.shapes import Shape


SHAPE = Shape(width=32, layers=2, heads=4, hidden=64, vocab=61, context=20, dropout=0.0)
GREEDY = Sampling(temperature=0)


def lively(shape: Shape) -> GPT:
    model = GPT(shape).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def prompt(rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(1))


def with_addons(model: GPT) -> GPT:
    addons = pytest.importorskip("oelm.method.addons")
    for block in model.blocks:
        attn = block.attn
        attn.addons = addons.Addons(
            attn.heads, attn.kv_heads, attn.head_dim, ("shift-keys", "channel-gain"), dtype=torch.float64
        )
        with torch.no_grad():
            for number, parameter in enumerate(attn.addons.parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double())
    return model


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("addons", [False, True])
def test_prefix_and_one_token_at_a_time_equal_the_full_pass(positions: str, kv_heads: int | None, addons: bool) -> None:
    model = lively(SHAPE.changed(positions=positions, kv_heads=kv_heads))
    if addons:
        with_addons(model)
    inputs = prompt(length=16)
    whole = model(inputs)
    cache = model.new_cache()
    parts = [model(inputs[:, :6], cache=cache), model(inputs[:, 6:9], cache=cache)]
    parts += [model(inputs[:, t : t + 1], cache=cache) for t in range(9, 16)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


def test_greedy_text_is_that_of_full_passes() -> None:
    model = lively(SHAPE)
    history = prompt()
    found = torch.stack(list(generate(model, history, tokens=12, sampling=GREEDY)), dim=1)
    for _ in range(12):
        history = torch.cat((history, model.logits(model(history))[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, history[:, 5:])


def test_generation_goes_on_behind_the_context() -> None:
    model = lively(SHAPE)
    found = list(generate(model, prompt(), tokens=50, sampling=GREEDY))
    history = torch.cat((prompt(), torch.stack(found, dim=1)), dim=1)
    # the 17th token overflows 20 positions: it is read from the last ten tokens alone
    expected = model.logits(model(history[:, 11:21]))[:, -1].argmax(-1)
    assert len(found) == 50
    assert torch.equal(found[16], expected)


def test_one_seed_gives_one_text_and_leaves_the_global_generator_alone() -> None:
    model = lively(SHAPE)
    state = torch.get_rng_state()

    def text(seed: int) -> list[int]:
        return [int(t) for t in generate(model, prompt(1), tokens=14, sampling=Sampling(temperature=3, seed=seed))]

    assert text(1) == text(1) != text(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_generation_stops_at_the_stop_token_and_restores_the_mode() -> None:
    model = lively(SHAPE.changed(dropout=0.5))
    model.train()
    greedy = [int(t) for t in generate(model, prompt(1), tokens=8, sampling=GREEDY)]
    stop = greedy[3]
    found = [int(t) for t in generate(model, prompt(1), tokens=8, sampling=GREEDY, stop=stop)]
    assert found == greedy[: greedy.index(stop) + 1]
    assert model.training


def test_top_k_and_top_p_keep_the_most_probable_tokens() -> None:
    shares = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])
    logits = shares.log()
    kept = allowed(logits, Sampling(temperature=1, top_k=2)).isfinite()
    assert kept.tolist() == [[True, True, False, False, False]]
    for top_p, count in ((0.4, 1), (0.5, 1), (0.6, 2), (0.84, 3), (1.0, 5)):
        assert int(allowed(logits, Sampling(temperature=1, top_p=top_p)).isfinite().sum()) == count, top_p
    colder = allowed(logits, Sampling(temperature=0.5)).softmax(-1)
    assert torch.allclose(colder, shares**2 / (shares**2).sum())


def test_sampled_frequencies_follow_the_probabilities() -> None:
    shares = torch.tensor([0.6, 0.3, 0.1, 0.0])
    generator = torch.Generator().manual_seed(0)
    drawn = choose(shares.log().expand(20_000, 4), Sampling(temperature=1), generator)
    found = torch.bincount(drawn, minlength=4) / 20_000
    assert torch.allclose(found, shares, atol=0.015)
    assert found[3] == 0


@pytest.mark.parametrize(
    ("ids", "count", "said"), [(torch.zeros(1, 0).long(), 3, "no token"), (prompt(), 0, "at least 1")]
)
def test_nothing_to_read_or_write_is_refused(ids: Tensor, count: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(generate(lively(SHAPE), ids, tokens=count))
