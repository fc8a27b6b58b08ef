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
from oelm.models.hub import Hosted
from oelm.models.shapes import HubModel, Shape
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


def test_of_a_classifier_padding_is_left_out_and_vocabulary_scores_are_not_there():
    model = model_of(head="classify", causal=False)
    ids, mask = torch.randint(1, 64, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    mask[1, 7:] = False
    found = probes.probe(model, name="c", variant="baseline", ids=ids, given={"mask": mask})
    alone = [probes.probe(model, name="c", variant="baseline", ids=row) for row in (ids[:1], ids[1:, :7])]
    weighed = (12 * np.array(alone[0].entropy) + 7 * np.array(alone[1].entropy)) / 19
    np.testing.assert_allclose(found.entropy, weighed, rtol=1e-4)
    assert found.loss is None
    assert np.isnan(found.prefix_matching).all()
    assert np.isnan(found.copying).all()


def hosted(kind, head):
    """A Hugging Face model of random weights, its attention written out here once more."""
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=48, vocab_size=64),
        "llama": lambda: transformers.LlamaConfig(**size, num_key_value_heads=2, intermediate_size=64),
        "bert": lambda: transformers.BertConfig(**size, intermediate_size=64, max_position_embeddings=48),
    }[kind]()
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    inner = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Hosted(inner, HubModel(path="made", head=head)).eval()


@pytest.mark.parametrize(("kind", "head"), [("gpt2", "lm"), ("llama", "lm"), ("bert", "classify")])
def test_hugging_face_models_by_their_own_attentions(kind, head):
    model = hosted(kind, head)
    ids, mask = torch.randint(0, 64, (3, 20)), torch.ones(3, 20, dtype=torch.bool)
    mask[1, 15:] = False
    given = {} if head == "lm" else {"mask": mask}
    found = probes.probe(model, name="x", variant="baseline", ids=ids, given=given)
    with torch.no_grad():
        said = model.inner(ids, output_attentions=True, **({"attention_mask": mask.long()} if given else {})).attentions
    for layer, attention in enumerate(said):
        for head_number in range(4):
            entropies, distances = [], []
            for row in range(3):
                length = 15 if given and row == 1 else 20
                for reader in range(length):
                    p = attention[row, head_number, reader, :length].double().numpy()
                    seen = length if given else reader + 1
                    distances.append(sum(p[j] * abs(reader - j) for j in range(length)))
                    if seen > 1:
                        entropies.append(-sum(v * math.log(v) for v in p if v > 0) / math.log(seen))
            assert found.entropy[layer][head_number] == pytest.approx(np.mean(entropies), rel=1e-4)
            assert found.distance[layer][head_number] == pytest.approx(np.mean(distances), rel=1e-4)
    assert model.inner.config._attn_implementation == "eager"
    assert np.isfinite(found.copying).all() == (head == "lm")


def test_matrices_and_logits_of_gpt2_by_hand():
    """Spectrum, match, logit scale, copying and induction of one head from GPT-2's fused matrices."""
    model = hosted("gpt2", "lm")
    body, ids = model.inner.transformer, torch.randint(0, 64, (2, 16))
    found = probes.probe(model, name="x", variant="baseline", ids=ids, seed=3)
    attention = body.h[0].attn
    q, k, v = (part[:, 8:16].double() for part in attention.c_attn.weight.detach().split(32, dim=1))
    kernel = q @ k.t()
    values = np.linalg.svd(kernel.numpy(), compute_uv=False)[:8]
    share = values / values.sum()
    assert found.qk_rank[0][1] == pytest.approx(np.exp(-(share * np.log(share)).sum()) / 8, rel=1e-4)
    assert found.qk_trace[0][1] == pytest.approx(float(kernel.trace()) / values.sum(), rel=1e-3, abs=1e-5)
    with torch.no_grad():
        x = body.h[0].ln_1(body.wte(ids) + body.wpe(torch.arange(16)))
        whole = attention.c_attn(x)
        logits = (whole[..., 8:16] @ whole[..., 40:48].transpose(1, 2) / math.sqrt(8)).double().numpy()
        seen = np.concatenate([logits[row][np.tril_indices(16)] for row in range(2)])
        assert found.logit_std[0][1] == pytest.approx(seen.std(ddof=1), rel=1e-4)
        generator = torch.Generator().manual_seed(3)
        repeated = torch.randint(0, 64, (4, 24), generator=generator).repeat(1, 2)
        drawn = torch.randperm(64, generator=generator)
        e, u = body.wte.weight[drawn], model.inner.lm_head.weight[drawn]
        wrote = body.h[0].ln_1(e).double() @ v @ attention.c_proj.weight[8:16].double() @ u.double().t()
        assert found.copying[0][1] == pytest.approx(float((wrote.argmax(1) == torch.arange(64)).double().mean()))
        maps = model.inner(repeated, output_attentions=True).attentions[0][:, 1]
        prefix = np.mean([float(maps[row, t, t - 23]) for row in range(4) for t in range(24, 47)])
    assert found.prefix_matching[0][1] == pytest.approx(prefix, rel=1e-4)


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
