"""Probes on models whose attention is known, and on runs of the real loop's form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oelm.errors import ConfigError
from oelm.evidence import export, probes
from oelm.method.apply import apply
from oelm.method.variant import named
from oelm.models.build import build
from oelm.models.shapes import Shape
from oelm.train.run import Run


SHAPE = Shape(width=32, layers=2, heads=2, hidden=64, vocab=64, context=48, dropout=0.0)


def model_of(variant="baseline", seed=0, **changes):
    model = build(SHAPE.changed(**changes), seed=seed).eval()
    apply(model, named(variant), seed=seed)
    return model


def run_of(variant="baseline", **changes):
    return Run.read(
        {
            "model": SHAPE.changed(**changes).model_dump(),
            "data": {"name": "demo", "context": 48, "tokenizer": "bytes"},
            "variant": variant,
            "budget": {"steps": 1},
        },
        where="test",
    )


def test_maps_are_the_attention_the_model_uses():
    """The map times the values, through the output, is what the attention module gives."""
    model = model_of()
    ids = torch.randint(0, 64, (2, 20))
    seen = {}
    attention = model.blocks[1].attn
    attention.register_forward_hook(lambda module, given, out: seen.update(x=given[0], out=out))
    with torch.no_grad():
        maps = probes.attention_maps(model, ids)
        _, _, v = attention.project(seen["x"])
        out = attention.o((maps[1] @ v.transpose(1, 2)).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, seen["out"])
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, 2, 20))
    assert float(maps[0].triu(1).abs().max()) == 0


def test_uniform_attention_has_full_entropy_and_known_distance():
    model = model_of()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q.weight.zero_()
    found = probes.probe(model, name="flat", variant="baseline", ids=torch.randint(0, 64, (2, 21)))
    assert np.allclose(found.entropy, 1.0, atol=1e-5)
    assert np.allclose(found.distance, 5.0, atol=1e-4)  # the mean over rows 0..20 of row/2
    assert np.allclose(found.logit_std, 0.0)


def test_orthogonal_heads_have_full_rank_and_tied_heads_match():
    free = probes.probe(model_of("oelm-freeze"), name="free", variant="oelm-freeze")
    tied = probes.probe(model_of("tied-shift"), name="tied", variant="tied-shift")
    gauss = probes.probe(model_of("gauss-frozen"), name="gauss", variant="gauss-frozen")
    assert np.allclose(tied.qk_trace, 1.0, atol=1e-5)
    assert np.allclose(tied.qk_rank, 1.0, atol=1e-5)
    assert np.abs(free.qk_trace).max() < 0.5
    assert np.mean(gauss.qk_rank) < np.mean(tied.qk_rank)


def test_spectrum_is_that_of_the_whole_kernel():
    q, k = torch.randn(8, 32), torch.randn(8, 32)
    whole = torch.linalg.svdvals(q.t() @ k)[:8]
    torch.testing.assert_close(probes._spectrum(q, k), whole, rtol=1e-4, atol=1e-4)


def test_a_perfect_induction_map_scores_one_and_a_flat_one_does_not():
    length = 16
    attention = torch.zeros(1, 1, length, length)
    attention[..., 0] = 1.0
    for row in range(length // 2, length - 1):
        attention[0, 0, row] = 0
        attention[0, 0, row, row - length // 2 + 1] = 1.0
    assert float(probes._prefix(attention)[0]) == 1.0
    flat = torch.full((1, 1, length, length), 1 / length)
    assert float(probes._prefix(flat)[0]) == pytest.approx(1 / length)


def test_loss_is_split_by_pairs_seen_before():
    model = model_of()
    ids = torch.tensor([[1, 2, 3, 1, 2, 9, 2, 3]])
    with torch.no_grad():
        whole, recall, other, share = probes.split_loss(model, ids)
        nats = torch.nn.functional.cross_entropy(model.logits(model(ids[:, :-1]))[0], ids[0, 1:], reduction="none")
    marks = torch.tensor([False, False, False, True, False, False, True])
    assert share == pytest.approx(2 / 7)
    assert whole == pytest.approx(float(nats.mean()))
    assert recall == pytest.approx(float(nats[marks].mean()))
    assert other == pytest.approx(float(nats[~marks].mean()))


def test_slices_have_no_matrix_and_no_spectrum():
    found = probes.probe(model_of("slices-shift"), name="s", variant="slices-shift")
    assert all(math.isnan(value) for layer in found.qk_rank for value in layer)
    assert np.isfinite(found.entropy).all()


def test_classifiers_are_refused():
    with pytest.raises(ConfigError, match="language models"):
        probes.probe(model_of(head="classify"), name="c", variant="baseline")


# ---- export


@pytest.mark.parametrize("variant", ["baseline", "oelm-freeze", "orth-trained"])
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"tied": False}, {"activation": "gelu-tanh"}])
def test_gpt2_of_transformers_gives_our_logits(variant, changes):
    pytest.importorskip("transformers")
    model, run = model_of(variant, **changes), run_of(variant, **changes)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing at its initial value: biases and norms matter too
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    converted = export.to_gpt2(model, run)
    ids = torch.randint(0, 64, (3, 48))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model.logits(model(ids)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("tied-shift", {}, "add-ons"),
        ("baseline", {"positions": "rope"}, "rope"),
        ("baseline", {"norm": "rms"}, "rms"),
        ("baseline", {"kv_heads": 1}, "key heads"),
    ],
)
def test_what_gpt2_cannot_say_is_refused_in_words(variant, changes, words):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=words):
        export.to_gpt2(model_of(variant, **changes), run_of(variant, **changes))
