"""Finding beyond the table: patterns, unknown and doubtful models, live views, torch's fused inference path."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from zoo import CASES, HEADS, WIDTH

import oelm
from oelm.errors import MethodError
from oelm.method.projections import find_sites
from oelm.method.split import Layout, SplitMultiheadAttention


class Odd(nn.Module):
    """Attention that no family names."""

    def __init__(self, q: str = "wq", k: str = "wk", v: str = "wv", o: str = "wo") -> None:
        super().__init__()
        self.names = (q, k, v, o)
        for name in self.names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, o = (getattr(self, name) for name in self.names)
        parts = [f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (q, k, v)]
        return o(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2))


class OddFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mixer_qkv(x).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(-2)
        return self.last(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2))


def pasted(said: str) -> dict[str, object]:
    """The pattern of a message as a user would paste it."""
    shown = re.search(r"pattern=(\{.*?\})", said)
    assert shown is not None, said
    found = ast.literal_eval(shown[1])
    assert isinstance(found, dict)
    return found


def stack(make: Callable[[], nn.Module], n: int = 3) -> nn.Module:
    layers = [nn.Sequential(make(), nn.LayerNorm(WIDTH)) for _ in range(n)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4)).double()


def test_an_unknown_model_is_told_the_pattern_that_works() -> None:
    model = stack(Odd)
    with pytest.raises(MethodError, match="no known family matches") as caught:
        oelm.apply(model, "oelm-freeze")
    said = str(caught.value)
    assert "nearest modules: *.*.wq (3x), *.*.wk (3x)" in said
    assert said.endswith("(guessed, so check: heads)")
    assert "\n" not in said
    pattern = pasted(said)
    assert pattern == {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "heads": 2}
    oelm.apply(copy.deepcopy(model), "oelm-freeze", pattern=pattern)
    pattern["heads"] = HEADS
    report = oelm.apply(model, "oelm-freeze", pattern=pattern)
    assert report.frozen == 3 * 2 * (WIDTH * WIDTH + WIDTH)
    assert [p.layer for p in oelm.find_projections(model, pattern) if p.role == "q"] == [0, 1, 2]
    oelm.verify(model)


def test_a_model_that_shows_its_heads_needs_no_heads_in_the_pattern() -> None:
    model = stack(Odd)
    model.num_heads = HEADS
    found = oelm.find_projections(model, {"q": "wq", "k": "wk"})
    assert {p.role for p in found} == {"q", "k"}
    assert all(p.n_heads == HEADS for p in found)


def test_a_fused_pattern_with_its_layout() -> None:
    model = stack(OddFused)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    before = model(x)
    pattern = {"qkv": "mixer_qkv", "layout": "groups", "heads": HEADS, "o": "last"}
    oelm.apply(model, "keep-frozen", pattern=pattern)
    assert (model(x) - before).abs().max() < 1e-12
    wrong = stack(OddFused)
    with pytest.raises(MethodError, match="pattern="):
        oelm.apply(wrong, "keep-frozen", pattern={"qkv": "mixr_qkv", "heads": HEADS})


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ({"q": "wq"}, "name q and k"),
        ({"q": "wq", "k": "wk", "qkv": "x"}, "qkv alone or q and kv"),
        ({"q": "wq", "k": "wk", "kv": "x"}, "qkv alone or q and kv"),
        ({"q": "wq", "k": "wk", "head": 4}, "did you mean 'heads'"),
        ({"q": "wq", "k": "wk", "heads": 0}, "above 0"),
        ({"q": "wq", "k": "wk", "heads": 5}, "5 heads of"),
        ({"q": "wq", "k": 3}, "end of a module's name"),
        ({"q": "wq", "k": "wk"}, "how many heads"),
        ({"q": "wx", "k": "wk", "heads": 4}, "matches no module"),
        ("wq", "expected a table"),
    ],
)
def test_mistakes_in_a_pattern(pattern: object, said: str) -> None:
    with pytest.raises(MethodError, match=said):
        oelm.find_projections(stack(Odd), pattern)  # type: ignore[arg-type]


def test_no_linear_at_all() -> None:
    with pytest.raises(MethodError, match="no Linear modules"):
        oelm.find_projections(nn.Sequential(nn.Conv1d(3, 3, 1)))
    with pytest.raises(MethodError, match="expected a torch"):
        oelm.find_projections("bert")  # type: ignore[arg-type]


def test_views_are_live() -> None:
    for name in ("llama", "gpt2", "gpt-neox", "torch-encoder", "timm"):
        model = CASES[name].build()
        found = next(p for p in oelm.find_projections(model) if p.role == "k")
        parameter = dict(model.named_parameters())[found.name]
        with torch.no_grad():
            found.weight.zero_()
        assert (parameter == 0).sum() >= found.weight.numel(), name


def test_a_gated_query_is_refused_and_not_halved() -> None:
    """Some models put a gate beside each head's query in one projection: more rows than heads * head_dim."""
    model = CASES["qwen3"].build()
    for module in model.modules():
        if hasattr(module, "q_proj"):
            module.q_proj = nn.Linear(WIDTH, 2 * module.q_proj.out_features)
    with pytest.raises(MethodError, match="something else beside the heads"):
        oelm.find_projections(model)


@pytest.mark.parametrize(
    "names",
    [
        ("W_Q", "W_K", "W_V", "W_O"),
        ("to_q", "to_k", "to_v", "to_out"),
        ("q_linear", "k_linear", "v_linear", "out"),
        ("queryProj", "keyProj", "valueProj", "outProj"),
        ("query_net", "key_net", "value_net", "fc_o"),
    ],
)
def test_names_people_use_give_a_pattern_without_a_doubt(names: tuple[str, str, str, str]) -> None:
    def make() -> nn.Module:
        attention = Odd(*names)
        attention.nh = HEADS
        return attention

    with pytest.raises(MethodError) as caught:
        oelm.find_projections(stack(make))
    said = str(caught.value)
    assert pasted(said) == {**dict(zip("qkvo", names, strict=True)), "heads": HEADS}
    assert said.endswith("}")
    found = oelm.find_projections(stack(make), pasted(said))
    assert {(p.layer, p.role, p.n_heads) for p in found} == {(i, role, HEADS) for i in range(3) for role in "qkvo"}


def test_names_that_say_nothing_give_a_pattern_that_says_it_is_guessed() -> None:
    with pytest.raises(MethodError, match=r"nearest modules: .*alpha.*check: which is q, k, v, o, heads\)") as caught:
        oelm.find_projections(stack(lambda: Odd("alpha", "beta", "gamma", "delta")))
    assert pasted(str(caught.value))["q"] == "alpha"
    with pytest.raises(MethodError, match=r"mixer_qkv.*check: heads, layout") as caught:
        oelm.find_projections(stack(OddFused))
    assert pasted(str(caught.value)) == {"qkv": "mixer_qkv", "heads": 2, "layout": "concat"}
    with pytest.raises(MethodError, match="if it has attention, name its projections"):
        oelm.find_projections(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))


def test_a_known_family_whose_heads_cannot_be_seen_is_told_what_to_say() -> None:
    model = stack(lambda: Odd("q_proj", "k_proj", "v_proj", "o_proj"))
    with pytest.raises(MethodError, match=r"how many heads .*\(2 is a guess\)") as caught:
        oelm.find_projections(model)
    assert pasted(str(caught.value)) == {"heads": 2}
    assert {p.n_heads for p in oelm.find_projections(model, {"heads": HEADS})} == {HEADS}


def test_keys_and_values_fused_in_a_pattern() -> None:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = HEADS
            self.to_q, self.to_kv, self.to_out = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            k, v = self.to_kv(x).chunk(2, dim=-1)
            parts = [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (self.to_q(x), k, v)]
            return self.to_out(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2))

    model = stack(Perceiver)
    with pytest.raises(MethodError) as caught:
        oelm.find_projections(model)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    before = model(x)
    oelm.apply(model, "keep-frozen", pattern=pasted(str(caught.value)))
    assert (model(x) - before).abs().max() < 1e-12
    assert not model[1][0].to_kv.k.weight.requires_grad
    assert model[1][0].to_kv.v.weight.requires_grad


def test_nanogpt() -> None:
    class CausalSelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_head = HEADS
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    model = stack(CausalSelfAttention)
    found = [p for p in oelm.find_projections(model) if p.layer == 2]
    fused = model[2][0].c_attn.weight
    assert [p.role for p in found] == ["q", "k", "v", "o"]
    for p, rows in zip(found[:3], fused.chunk(3), strict=True):
        assert torch.equal(p.weight, rows.view(HEADS, -1, WIDTH))


def test_changed_and_extended_torch_attention_is_refused() -> None:
    class Mine(nn.MultiheadAttention):
        pass

    with pytest.raises(MethodError, match="changes torch's"):
        oelm.apply(nn.Sequential(Mine(WIDTH, HEADS)), "oelm-freeze")
    with pytest.raises(MethodError, match="bias_k"):
        oelm.find_projections(nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True))


@pytest.mark.parametrize("mask", [False, True])
def test_the_fused_inference_path_of_torch(mask: bool) -> None:
    """With gradients off torch may take its fused kernels; they must not read a stale stacked matrix."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    x = torch.randn(2, 9, WIDTH)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    settings = {"src_key_padding_mask": padding} if mask else {}
    kept = copy.deepcopy(model)
    oelm.apply(kept, "keep-frozen")
    keep = ~padding if mask else torch.ones_like(padding)
    with torch.inference_mode():
        assert torch.allclose(model(x, **settings)[keep], kept(x, **settings)[keep], atol=1e-5)
    drawn = copy.deepcopy(model)
    oelm.apply(drawn, "oelm-freeze")
    slow = drawn(x, **settings)  # gradients on: never fused
    with torch.inference_mode():
        assert torch.allclose(slow[keep], drawn(x, **settings)[keep], atol=1e-5)
    assert not torch.allclose(slow, model(x, **settings), atol=1e-2)


def test_torch_attention_can_be_copied_and_cast_after_splitting() -> None:
    model = CASES["torch-encoder"].build()
    oelm.apply(model, "oelm-freeze")
    twin = copy.deepcopy(model)
    oelm.verify(twin)
    assert any(isinstance(m, SplitMultiheadAttention) for m in twin.modules())
    assert set(twin.state_dict()) == set(CASES["torch-encoder"].build().state_dict())
    x = torch.randn(2, 5, WIDTH)
    assert twin.float()(x).dtype == torch.float32


def test_layout_takes_what_it_joins() -> None:
    generator = torch.Generator().manual_seed(0)
    for kind, heads in (("concat", (4, 2)), ("groups", (4, 2)), ("groups", (6, 1)), ("groups", (3, 3))):
        layout = Layout(kind, {"q": heads[0], "k": heads[1], "v": heads[1]}, 5)
        fused = torch.randn(layout.rows, 7, generator=generator)
        parts = {role: layout.take(fused, role).flatten(0, 1) for role in "qkv"}
        assert torch.equal(layout.join(parts), fused)
        x = torch.randn(3, 7, generator=generator)
        outputs = {role: x @ part.t() for role, part in parts.items()}
        assert torch.allclose(layout.join_outputs(outputs), x @ fused.t(), atol=1e-5)


def test_stacks_do_not_depend_on_the_head() -> None:
    with_head, without = CASES["bert"].build(), CASES["bert-base-model"].build()
    for model in (with_head, without):
        oelm.apply(model, "oelm-freeze", seed=4)
    pairs = zip(oelm.find_projections(with_head), oelm.find_projections(without), strict=True)
    assert all(torch.equal(a.weight, b.weight) for a, b in pairs if a.role in ("q", "k"))


def test_two_towers_get_labels_of_their_own() -> None:
    model = nn.ModuleDict({"left": CASES["gpt"].build(), "right": CASES["gpt"].build()})
    assert {site.stack for site in find_sites(model)} == {"left.blocks", "right.blocks"}


def test_cross_attention_is_labelled_and_left_alone_by_default() -> None:
    for name in ("bart", "t5", "whisper"):
        model = CASES[name].build()
        report = oelm.apply(model, "oelm-freeze")
        cross = [p for p in oelm.find_projections(model) if p.stack == "decoder.cross"]
        assert len(cross) == 2 * 4
        assert all(p.weight.requires_grad for p in cross)
        assert any("cross" in warning for warning in report.warnings)
        assert "decoder.cross" not in report.layers


def test_torchs_decoder_and_a_self_attention_of_the_same_name() -> None:
    model = nn.Transformer(WIDTH, HEADS, 2, 3, 48, batch_first=True)
    stacks = {p.stack for p in oelm.find_projections(model)}
    assert stacks == {"encoder", "decoder", "decoder.cross"}
    mine = nn.ModuleDict({"multihead_attn": nn.MultiheadAttention(WIDTH, HEADS), "head": nn.Linear(WIDTH, 2)})
    assert {p.stack for p in oelm.find_projections(mine)} == {"main"}


def test_bert_decoder_and_gpt2_with_cross_attention() -> None:
    import transformers
    from zoo import _GPT2, _settings

    bert = transformers.BertConfig(**_settings(is_decoder=True, add_cross_attention=True))
    gpt2 = transformers.GPT2Config(**_GPT2, add_cross_attention=True)
    for model in (transformers.BertLMHeadModel(bert), transformers.GPT2LMHeadModel(gpt2)):
        model = model.double().eval()
        ids, memory = torch.randint(3, 90, (2, 5)), torch.randn(2, 7, WIDTH, dtype=torch.float64)
        before = model(input_ids=ids, encoder_hidden_states=memory).logits
        found = oelm.find_projections(model)
        assert sum(p.stack.endswith(".cross") for p in found) == 3 * 4
        keys = set(model.state_dict())
        oelm.apply(model, oelm.Variant(init="keep", cross=True))
        assert (model(input_ids=ids, encoder_hidden_states=memory).logits - before).abs().max() < 1e-12
        assert set(model.state_dict()) == keys
