"""Add-ons: their arithmetic, and that padding, packing, caches and recomputation never change a prediction."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import CASES

import oelm
from oelm.errors import MethodError
from oelm.method.addons import Addons


ALL = ("shift-keys", "head-gain", "channel-gain", "query-mix")
slow = pytest.mark.slow
DECODERS = ["llama", "qwen3", "gpt2"]
RARER = ["mistral", "gemma3", "olmo2", "phi", "phi3", "gpt-neox", "falcon-groups", "bloom", "falcon-old", "opt"]
RARER += ["gptj", "gpt-neo", "mpt"]  # these three compute attention in float32
DECODERS += [pytest.param(name, marks=slow) for name in RARER]
NO_PADDING = ("bloom", "mpt", "falcon-old")  # families whose own logits change with padding on the left
ENCODERS = ["bert", "modernbert"]
ENCODERS += [pytest.param(name, marks=slow) for name in ("roberta", "distilbert", "electra", "albert", "mpnet")]
SEQ2SEQ = ["t5", pytest.param("bart", marks=slow), pytest.param("mbart", marks=slow)]


def stir(model: nn.Module) -> nn.Module:
    """Add-ons away from their neutral values."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".addons." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.7)
    return model


def made(name: str, addons: tuple[str, ...] = ALL, **more: object) -> nn.Module:
    model = CASES[name].build()
    oelm.apply(model, oelm.Variant(addons=addons, **more), seed=1)
    return stir(model)


def tokens(rows: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, name: str = "") -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 if name in RARER[-3:] else 1e-12)


# The module by itself


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 3), length=st.integers(1, 9), seed=st.integers(0, 999), split=st.integers(0, 8))
def test_keys_are_mixed_with_their_predecessors_within_documents(rows: int, length: int, seed: int, split: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    addons = Addons(4, 2, 8, ["shift-keys"], dtype=torch.float64)
    assert addons.shift is not None
    with torch.no_grad():
        addons.shift.copy_(torch.randn(2, 8, generator=generator))
    q = torch.randn(rows, length, 4, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(rows, length, 2, 8, generator=generator, dtype=torch.float64)
    first = torch.rand(rows, length, generator=generator) < 0.3
    weight = 1 / (1 + torch.exp(-addons.shift))
    expected = k.clone()
    for row in range(rows):
        for t in range(1, length):
            if not first[row, t]:
                expected[row, t] = (1 - weight) * k[row, t] + weight * k[row, t - 1]
    found_q, found_k = addons(q, k, first=first)
    assert torch.equal(found_q, q)
    close(found_k, expected)
    if 0 < split < length:  # in two parts, the second knowing the last key of the first
        _, one = addons(q[:, :split], k[:, :split], first=first[:, :split])
        _, two = addons(q[:, split:], k[:, split:], first=first[:, split:], previous=k[:, split - 1 : split])
        close(torch.cat((one, two), 1), expected)


def test_gains_start_as_exactly_no_change_and_scale_logits() -> None:
    addons = Addons(4, 2, 8, ["head-gain", "channel-gain", "query-mix"])
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    same_q, same_k = addons(q, k)
    assert torch.equal(same_q, q)
    assert torch.equal(same_k, k)
    with torch.no_grad():
        addons.head_gain.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        addons.channel_gain[:, 3] = 0.5
    scaled, _ = addons(q, k)
    expected = q * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    expected[..., 3] *= 0.5
    torch.testing.assert_close(scaled, expected)
    assert sum(p.numel() for p in addons.parameters()) == 4 + 4 * 8 + 4 * 8 * 8
    assert {p.dtype for p in addons(q.bfloat16(), k.bfloat16())} == {torch.bfloat16}


def test_unknown_addons_are_refused() -> None:
    with pytest.raises(MethodError, match="head-gain"):
        Addons(4, 4, 8, ["gain"])


# Hooked on models of others


class _Shifted(nn.Module):
    """An independent shift of keys (B, T, heads * head_dim) after a projection, for a model without padding."""

    def __init__(self, inner: nn.Module, mu: Tensor) -> None:
        super().__init__()
        self.inner, self.mu = inner, mu.detach().flatten()

    def forward(self, x: Tensor) -> Tensor:
        k = self.inner(x)
        before = torch.roll(k, 1, dims=1)
        before[:, 0] = k[:, 0]
        weight = self.mu.sigmoid()
        return (1 - weight) * k + weight * before


class _Scaled(nn.Module):
    def __init__(self, inner: nn.Module, head: Tensor, channel: Tensor, mix: Tensor) -> None:
        super().__init__()
        self.inner, self.gain = inner, (head[:, None] * channel).detach().flatten()
        self.mix = torch.block_diag(*mix.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.mix * self.gain


def test_hooks_do_what_modules_written_into_the_model_would() -> None:
    plain = CASES["llama"].build()
    model = copy.deepcopy(plain)
    oelm.apply(model, oelm.Variant(addons=ALL, init="keep", freeze="none"))
    stir(model)
    for ours, theirs in zip(model.model.layers, plain.model.layers, strict=True):
        addons = ours.self_attn.addons
        theirs.self_attn.q_proj = _Scaled(
            theirs.self_attn.q_proj, addons.head_gain, addons.channel_gain, addons.query_mix
        )
        theirs.self_attn.k_proj = _Shifted(theirs.self_attn.k_proj, addons.shift)
    close(CASES["llama"].forward(model), CASES["llama"].forward(plain))


@pytest.mark.parametrize(
    "name", [*DECODERS, *ENCODERS, *SEQ2SEQ, "vit", "gpt", "gpt-gqa-bias", pytest.param("whisper", marks=slow)]
)
def test_every_scalar_gets_a_gradient(name: str) -> None:
    model = made(name)
    CASES[name].forward(model).square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if ".addons." in n}
    assert grads
    assert all(g is not None and bool((g != 0).any()) for g in grads.values())


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_each_of_them_works_alone(name: str, kind: str) -> None:
    plain, model = CASES[name].build(), made(name, (kind,), init="keep", freeze="none")
    assert [n.rpartition(".")[2] for n, _ in model.named_parameters() if ".addons." in n]
    assert (CASES[name].forward(model) - CASES[name].forward(plain)).abs().max() > 1e-6


@pytest.mark.parametrize("name", DECODERS)
def test_prefix_and_one_token_at_a_time_equal_the_full_pass(name: str) -> None:
    model = made(name)
    x = tokens(2, 10)
    with torch.no_grad():
        full = model(x).logits
        out = model(x[:, :3], use_cache=True)
        parts = [out.logits]
        for piece in (x[:, 3:6], *x[:, 6:].split(1, dim=1)):  # a second piece of several tokens, then one by one
            out = model(piece, past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    close(torch.cat(parts, 1), full, name)


@pytest.mark.parametrize("name", DECODERS)
def test_padding_on_either_side_changes_no_decoder(name: str) -> None:
    if name in NO_PADDING:
        pytest.skip("without add-ons too")
    model = made(name)
    x, pad = tokens(2, 7), torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[0] * 3 + [1] * 7] * 2)
    positions = {} if name == "opt" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        full = model(x).logits
        left = model(torch.cat((pad, x), 1), attention_mask=mask, **positions).logits[:, 3:]
        right = model(torch.cat((x, pad), 1), attention_mask=mask.flip(1)).logits[:, :7]
    close(left, full, name)
    close(right, full, name)


def test_padding_between_a_prefix_and_what_follows_is_no_predecessor() -> None:
    model = made("llama")
    x = tokens(2, 9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1], [1] * 9])  # the first row's prompt was padded on the right
    with torch.no_grad():
        full = model(x, attention_mask=mask, position_ids=torch.arange(9)[None]).logits
        out = model(x[:, :5], attention_mask=mask[:, :5], use_cache=True)
        later = model(x[:, 5:], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True).logits
        other = torch.where(mask.bool(), x, tokens(2, 9, seed=6))
        close(model(other, attention_mask=mask).logits[:, 5:], full[:, 5:])
    close(later, full[:, 5:])


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_changes_no_encoder(name: str) -> None:
    model = made(name)
    body = model.base_model
    x = tokens(2, 7)
    padded = torch.cat((x, torch.ones(2, 4, dtype=torch.long)), 1)
    mask = torch.tensor([[1] * 7 + [0] * 4] * 2)
    with torch.no_grad():
        alone = body(input_ids=x, attention_mask=mask[:, :7])[0]
        together = body(input_ids=padded, attention_mask=mask)[0][:, :7]
        changed = body(input_ids=torch.cat((x, tokens(2, 4, seed=8)), 1), attention_mask=mask)[0][:, :7]
    close(together, alone)
    close(changed, alone)


def test_left_padding_leaks_nothing_into_an_encoder() -> None:
    model = made("bert").base_model
    x, mask = tokens(2, 7), torch.tensor([[0] * 3 + [1] * 7] * 2)
    with torch.no_grad():
        a = model(input_ids=torch.cat((tokens(2, 3, seed=1), x), 1), attention_mask=mask)[0][:, 3:]
        b = model(input_ids=torch.cat((tokens(2, 3, seed=2), x), 1), attention_mask=mask)[0][:, 3:]
    close(a, b)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gpt-neox"])
def test_packed_documents_are_told_apart_by_their_positions(name: str) -> None:
    model = made(name)
    a, b = tokens(2, 6), tokens(2, 5, seed=4)
    positions = torch.cat((torch.arange(6), torch.arange(5)))[None].expand(2, -1)
    with torch.no_grad():
        together = model(torch.cat((a, b), 1), position_ids=positions, use_cache=False).logits
        close(together[:, :6], model(a).logits)
        close(together[:, 6:], model(b).logits)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_cache_writes_what_it_writes_without(beams: int) -> None:
    model = made("llama", ("shift-keys",))
    x = tokens(2, 5)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0, "eos_token_id": None}
    kept = model.generate(x, use_cache=True, **options)
    assert torch.equal(kept, model.generate(x, use_cache=False, **options))
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), x), 1)
    mask = (torch.arange(8) >= 3).long()[None].expand(2, -1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], kept)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoder_generation_with_a_cache_equals_the_full_pass(name: str) -> None:
    model = made(name)
    x, y = tokens(2, 8), tokens(2, 6, seed=5)
    with torch.no_grad():
        full = model(input_ids=x, decoder_input_ids=y).logits
        out = model(input_ids=x, decoder_input_ids=y[:, :2], use_cache=True)
        parts = [out.logits]
        for piece in y[:, 2:].split(1, dim=1):
            out = model(
                encoder_outputs=(out.encoder_last_hidden_state,),
                decoder_input_ids=piece,
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            parts.append(out.logits)
    close(torch.cat(parts, 1), full)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "falcon-groups", "phi3"])
def test_layers_that_stay_fused_get_the_same_addons_as_split_ones(name: str) -> None:
    fused = CASES[name].build()
    split = copy.deepcopy(fused)
    for model, freeze in ((fused, "none"), (split, "qk")):
        oelm.apply(model, oelm.Variant(init="keep", freeze=freeze, addons=ALL))
        stir(model)
    close(CASES[name].forward(fused), CASES[name].forward(split))


def test_a_cache_that_was_cut_is_refused() -> None:
    model = made("llama")
    x = tokens(2, 6)
    with torch.no_grad():
        cache = model(x, use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :-2], layer.values[:, :, :-2]
        with pytest.raises(MethodError, match="the cache was cut"):
            model(x[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("additive", [False, True])
def test_a_square_mask_says_which_token_a_key_follows(additive: bool) -> None:
    model = made("llama")
    a, b = tokens(2, 6), tokens(2, 5, seed=4)
    document = torch.tensor([0] * 6 + [1] * 5)
    seen = (document[:, None] == document).tril()[None, None].expand(2, 1, -1, -1)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e4) if additive else seen
    positions = torch.cat((torch.arange(6), torch.arange(5)))[None]
    x = torch.cat((a, b), 1)
    with torch.no_grad():
        out = model(x, attention_mask=mask, position_ids=positions, use_cache=False).logits
        close(out[:, :6], model(a).logits)
        close(out[:, 6:], model(b).logits)
        # without positions to tell them apart, and with a cache: the second document's tokens one at a time
        whole = model(x, attention_mask=mask, use_cache=False).logits
        prefix = model(x[:, :8], attention_mask=mask[..., :8, :8], use_cache=True)
        parts = [prefix.logits]
        for t in range(8, 11):
            now = mask[..., t : t + 1, : t + 1]
            parts.append(model(x[:, t : t + 1], attention_mask=now, past_key_values=prefix.past_key_values).logits)
    close(torch.cat(parts, 1), whole)


def test_static_caches_and_unusual_masks_are_refused() -> None:
    from transformers import StaticCache

    model = made("llama")
    x = tokens(2, 6)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), pytest.raises(MethodError, match="StaticCache"):
        model(x, past_key_values=cache, use_cache=True)
    with torch.no_grad(), pytest.raises(MethodError, match="attention_mask of shape"):
        model(x, attention_mask=torch.ones(2, 4, 6, 6, dtype=torch.bool))
    close(CASES["llama"].forward(model), CASES["llama"].forward(model))  # and the model still works


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("deberta-v2", {}, "relative positions"),
        ("torch-encoder", {}, "inside one function"),
        ("t5", {"cross": True}, "cross-attention"),
        ("timm", {}, "no Hugging Face model"),
    ],
)
def test_where_shifted_keys_cannot_be_right_they_are_refused(name: str, more: dict[str, object], message: str) -> None:
    model = CASES[name].build()
    before = CASES[name].forward(model)
    names = [n for n, _ in model.named_parameters()]
    with pytest.raises(MethodError, match=message):
        oelm.apply(model, oelm.Variant(addons=("shift-keys",), **more))
    assert [n for n, _ in model.named_parameters()] == names
    assert torch.equal(CASES[name].forward(model), before)


@pytest.mark.parametrize("name", ["deberta-v2", "timm", "t5"])
def test_gains_work_where_shifted_keys_do_not(name: str) -> None:
    model = CASES[name].build()
    before = CASES[name].forward(model)
    oelm.apply(model, oelm.Variant(init="keep", freeze="none", addons=("head-gain", "channel-gain"), cross=True))
    close(CASES[name].forward(model), before)
    stir(model)
    assert not torch.allclose(CASES[name].forward(model), before)


def test_copies_of_a_model_use_their_own_scalars() -> None:
    model = made("llama")
    twin = copy.deepcopy(model)
    expected = CASES["llama"].forward(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".addons." in name:
                parameter.zero_()
    close(CASES["llama"].forward(twin), expected)


def test_gradient_checkpointing_gives_the_same_gradients_or_refuses() -> None:
    x = tokens(2, 8)
    mask = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    grads = []
    original = made("llama").train()
    for recompute in (False, True):
        model = copy.deepcopy(original)
        if recompute:
            model.gradient_checkpointing_enable()
        for _ in range(2):  # two passes, each with its own backward: gradient accumulation
            model(x, attention_mask=mask, use_cache=False).logits.square().mean().backward()
            with torch.no_grad():
                model(x, use_cache=False)
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    for a, b in zip(*grads, strict=True):
        close(a, b)
    loss = model(x, attention_mask=mask, use_cache=False).logits.mean() + model(x, use_cache=False).logits.mean()
    with pytest.raises(MethodError, match="gradient checkpointing"):
        loss.backward()


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.slow
def test_compiled_training_gives_the_same_gradients(name: str) -> None:
    x = tokens(2, 9)

    original = made(name)

    def run(compiled: bool) -> list[Tensor]:
        model = copy.deepcopy(original)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        out = (
            model.logits(call(x))
            if name == "gpt"
            else call(x, attention_mask=torch.ones_like(x), use_cache=False).logits
        )
        out.square().mean().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    torch._dynamo.reset()
    for a, b in zip(run(False), run(True), strict=True):
        close(a, b)


def test_saving_with_addons_says_first_that_plain_transformers_drops_them(tmp_path: object) -> None:
    model = made("bert")
    with pytest.warns(UserWarning, match="add-ons"):
        model.save_pretrained(tmp_path)
    plain = CASES["bert"].build()
    oelm.apply(plain, "oelm-freeze")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain.save_pretrained(tmp_path)
