"""Our transformer against Hugging Face's and against its own definition."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from oelm.errors import ConfigError
from oelm.method.addons import Addons
from oelm.models.build import build
from oelm.models.gpt import GPT, Gelu
from oelm.models.shapes import PRESETS, Shape


TINY = Shape(width=32, layers=2, heads=4, hidden=64, vocab=97, context=24, dropout=0.0)


def tokens(*shape: int, seed: int = 0, vocab: int = 97) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def lively(model: GPT, seed: int = 5) -> GPT:
    """In float64 with weights large enough that attention and norms matter."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def logits(model: GPT, inputs: Tensor, **fields: Tensor) -> Tensor:
    return model.logits(model(inputs, **fields))


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt-512", 44_896_768),
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt-512-1024", 44_896_768 + 512 * 512),
        ("gpt-512-8192", 44_896_768 - 512 * 512),
        ("gpt-512-classifier", 44_896_768 + 2 * 513),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(preset: str, count: int) -> None:
    with torch.device("meta"):
        model = build(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_logits_and_gradient_equal_those_of_hugging_face_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    ours = lively(GPT(TINY.changed(qkv_bias=True, activation="gelu-tanh")))
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_positions=24, n_embd=32, n_layer=2, n_head=4, n_inner=64)
    )
    theirs.double().eval()
    names = {"transformer.wte.weight": ours.embed.weight, "transformer.wpe.weight": ours.position.weight}
    for kind in ("weight", "bias"):
        names[f"transformer.ln_f.{kind}"] = getattr(ours.norm, kind)
        for i, block in enumerate(ours.blocks):
            at = f"transformer.h.{i}."
            names[f"{at}ln_1.{kind}"] = getattr(block.norm1, kind)
            names[f"{at}ln_2.{kind}"] = getattr(block.norm2, kind)
            parts = [getattr(linear, kind) for linear in (block.attn.q, block.attn.k, block.attn.v)]
            names[f"{at}attn.c_attn.{kind}"] = torch.cat(parts)
            names[f"{at}attn.c_proj.{kind}"] = getattr(block.attn.o, kind)
            names[f"{at}mlp.c_fc.{kind}"] = getattr(block.mlp.up, kind)
            names[f"{at}mlp.c_proj.{kind}"] = getattr(block.mlp.down, kind)
    with torch.no_grad():
        for name, value in names.items():
            target = theirs.get_parameter(name)
            target.copy_(value.t() if value.ndim == 2 and "c_" in name else value)
    inputs = tokens(3, 20)
    expected = theirs(inputs).logits
    found = logits(ours, inputs)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    found[:, -1].logsumexp(-1).sum().backward()
    expected[:, -1].logsumexp(-1).sum().backward()
    fused = theirs.transformer.h[0].attn.c_attn.weight.grad.t()
    attn = ours.blocks[0].attn
    assert torch.allclose(torch.cat([attn.q.weight.grad, attn.k.weight.grad, attn.v.weight.grad]), fused, atol=1e-10)
    assert torch.allclose(ours.embed.weight.grad, theirs.transformer.wte.weight.grad, atol=1e-10)


def test_rotary_positions_equal_llamas() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    from oelm.models.attention import rotate, rotation

    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    q = torch.randn(2, 4, 11, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(7, 18)[None]
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    expected, _ = llama.apply_rotary_pos_emb(q, q, cos, sin)
    assert torch.allclose(rotate(q, *rotation(positions, 8)), expected, atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_no_token_sees_a_later_one(positions: str) -> None:
    model = lively(GPT(TINY.changed(positions=positions)))
    inputs = tokens(2, 16)
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    before, after = logits(model, inputs), logits(model, changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amin(dim=(0, 2)).max() > 0
    assert not torch.allclose(before[:, 15], after[:, 15])


def test_a_bidirectional_model_sees_both_sides() -> None:
    model = lively(GPT(TINY.changed(causal=False, head="tag", labels=5)))
    inputs = tokens(1, 12)
    changed = inputs.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 97
    assert not torch.allclose(logits(model, inputs)[:, 0], logits(model, changed)[:, 0])


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_read_as_if_alone(positions: str, causal: bool) -> None:
    model = lively(GPT(TINY.changed(positions=positions, causal=causal, head="lm" if causal else "tag")))
    one, two, three = tokens(1, 5, seed=1), tokens(1, 9, seed=2), tokens(1, 4, seed=3)
    packed = logits(
        model,
        torch.cat((one, two, three), dim=1),
        documents=torch.tensor([[7] * 5 + [3] * 9 + [8] * 4]),
    )
    alone = torch.cat([logits(model, part) for part in (one, two, three)], dim=1)
    assert torch.allclose(packed, alone, atol=1e-10)


@pytest.mark.parametrize("pool", ["last", "mean"])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_changes_nothing(pool: str, causal: bool) -> None:
    model = lively(GPT(TINY.changed(head="classify", pool=pool, causal=causal, labels=3)))
    short, long = tokens(1, 6, seed=1), tokens(1, 13, seed=2)
    padded = torch.full((2, 16), 96)
    padded[0, :6], padded[1, :13] = short[0], long[0]
    mask = torch.arange(16) < torch.tensor([[6], [13]])
    together = logits(model, padded, mask=mask)
    alone = torch.cat([logits(model, part) for part in (short, long)])
    assert torch.allclose(together, alone, atol=1e-10)
    assert torch.equal(together, logits(model, padded, mask=mask, last=torch.tensor([5, 12])))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_on_the_left_is_read_by_nobody(causal: bool) -> None:
    model = lively(GPT(TINY.changed(positions="rope", head="classify", causal=causal, labels=3)))
    addons = Addons(4, 4, 8, ["shift-keys"], dtype=torch.float64)
    for block in model.blocks:
        block.attn.addons = addons
    words, mask = tokens(2, 9), torch.arange(13)[None].expand(2, -1) >= 4
    padded = torch.cat((tokens(2, 4, seed=5), words), dim=1)
    other = torch.cat((tokens(2, 4, seed=6), words), dim=1)
    found = logits(model, padded, mask=mask)
    assert torch.equal(found, logits(model, other, mask=mask))
    assert torch.allclose(found, logits(model, words), atol=1e-4)  # rotations are computed in float32
    found.sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_padding_on_the_left_of_a_cache_stays_unread() -> None:
    model = lively(GPT(TINY.changed(positions="rope")))
    inputs, mask = tokens(2, 12), torch.arange(12)[None].expand(2, -1) >= 4
    whole = model(inputs, mask=mask)[:, 5:]
    cache = model.new_cache()
    model(inputs[:, :5], mask=mask[:, :5], cache=cache)
    parts = [model(inputs[:, 5:8], mask=mask[:, :8], cache=cache)]
    parts += [model(inputs[:, t : t + 1], mask=mask[:, : t + 1], cache=cache) for t in range(8, 12)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-10)
    with pytest.raises(ConfigError, match="a mask of 1 tokens"):
        model(inputs[:, :1], mask=mask[:, :1], cache=cache)


def test_grouped_heads_equal_repeated_ones() -> None:
    grouped = lively(GPT(TINY.changed(kv_heads=2)))
    full = GPT(TINY).double()
    state = grouped.state_dict()
    for name in [name for name in state if ".attn.k." in name or ".attn.v." in name]:
        state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    inputs = tokens(2, 10)
    assert torch.allclose(logits(grouped, inputs), logits(full, inputs), atol=1e-10)


def test_dropout_is_off_in_evaluation_and_on_in_training() -> None:
    model = lively(GPT(TINY.changed(dropout=0.3)))
    inputs = tokens(2, 10)
    assert not torch.equal(logits(model, inputs), logits(model, inputs))
    model.eval()
    assert torch.equal(logits(model, inputs), logits(model, inputs))
    plain = GPT(TINY).double()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, inputs), logits(plain, inputs))


def test_initial_weights_are_a_function_of_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one = GPT(TINY, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert all(torch.equal(one[name], value) for name, value in GPT(TINY, seed=3).state_dict().items())
    other = GPT(TINY, seed=4).state_dict()
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert not torch.equal(one["blocks.0.attn.q.weight"], one["blocks.0.attn.k.weight"])
    # what two shapes have in common is the same in both
    deeper = GPT(TINY.changed(layers=4, kv_heads=2), seed=3).state_dict()
    assert torch.equal(deeper["blocks.1.mlp.up.weight"], one["blocks.1.mlp.up.weight"])


def test_initial_weights_have_the_stated_distribution() -> None:
    model = GPT(Shape(width=256, layers=1, heads=4, hidden=512, vocab=500, context=64))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001
    assert {name for name, _ in model.named_parameters() if name.endswith("attn.q.bias")} == set()


def test_recomputed_activations_give_the_same_gradient() -> None:
    model = GPT(TINY.changed(dropout=0.2)).double()
    inputs = tokens(2, 10)
    grads = []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad()
        torch.manual_seed(0)
        logits(model, inputs).logsumexp(-1).sum().backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.allclose(*grads, rtol=0, atol=1e-12)


def test_a_sequence_longer_than_the_context_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"25 tokens is longer than model\.context = 24"):
        GPT(TINY)(tokens(1, 25))
    with pytest.raises(ConfigError, match=r"data\.context = 25"):
        build(TINY, context=25)
    assert GPT(TINY.changed(positions="rope"))(tokens(1, 25)).shape == (1, 25, 32)


def test_build_takes_vocabulary_and_labels_from_the_data() -> None:
    assert build(TINY, vocab=11, labels=9).vocabulary.shape == (11, 32)
    untied = build(TINY.changed(tied=False), vocab=11)
    assert untied.vocabulary is untied.head.weight
    assert untied.vocabulary is not untied.embed.weight
    assert build(TINY.changed(head="tag"), labels=9).head.weight.shape == (9, 32)
    assert build(TINY.changed(head="qa"), labels=9).head.weight.shape == (2, 32)
    with pytest.raises(ConfigError, match="only a language model"):
        _ = build(TINY.changed(head="tag")).vocabulary


def test_the_quick_gelu_is_the_exact_one_and_so_is_its_slope():
    x = torch.linspace(-12, 12, 200_001, requires_grad=True)
    quick = Gelu.apply(x)
    quick.sum().backward()
    at = x.detach().double().numpy()
    share = scipy.stats.norm.cdf(at)
    np.testing.assert_allclose(quick.detach().numpy(), at * share, atol=5e-7)
    np.testing.assert_allclose(x.grad.numpy(), share + at * scipy.stats.norm.pdf(at), atol=5e-7)
