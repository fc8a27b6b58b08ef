"""`apply` does what the variant says, all or nothing, and `verify` sees every way it can be undone."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from zoo import CASES, HEADS, WIDTH, _settings

import oelm
from oelm.errors import ConfigError, FrozenWeightsChanged, MethodError
from oelm.method.apply import convert, fuse
from oelm.method.record import Record, digest, record_of
from oelm.method.report import logit_std
from oelm.method.split import Slice, SplitProjection


def gpt(width: int = WIDTH, heads: int = HEADS, **more: Any) -> nn.Module:
    from oelm.models.gpt import GPT
    from oelm.models.shapes import Shape

    settings = {"width": width, "layers": 4, "heads": heads, "hidden": 48, "vocab": 64, "context": 32, "dropout": 0.0}
    return GPT(Shape(**(settings | more)))


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that an atomic failure must leave alone."""
    return {
        "values": {n: p.detach().clone() for n, p in model.named_parameters()},
        "flags": {n: p.requires_grad for n, p in model.named_parameters()},
        "identity": {n: id(p) for n, p in model.named_parameters()},
        "modules": {n: (id(m), type(m)) for n, m in model.named_modules()},
        "keys": list(model.state_dict()),
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_hooks)) for m in model.modules()
        ],
    }


def unchanged(model: nn.Module, before: dict[str, Any]) -> bool:
    now = state(model)
    values = now.pop("values")
    old = {k: v for k, v in before.items() if k != "values"}
    return now == old and all(torch.equal(values[n], v) for n, v in before["values"].items())


def heads_of(model: nn.Module, role: str) -> list[torch.Tensor]:
    return [p.weight.detach() for p in oelm.find_projections(model) if p.role == role]


def test_gpt_512_counts() -> None:
    from oelm.models.gpt import GPT
    from oelm.models.shapes import PRESETS

    report = oelm.apply(GPT(PRESETS["gpt-512"]), "oelm-freeze")
    assert (report.total, report.frozen) == (44_896_768, 3_145_728)
    assert f"{report.frozen / report.total:.2%}" == "7.01%"
    assert report.logit_std == pytest.approx(1.0, abs=0.03)


def test_the_spread_of_the_logits_at_step_0() -> None:
    """Orthogonal 1.0, N(0, 0.02²) 0.2 at width 512, whatever the width of the heads."""
    for name, expected in [("oelm-freeze", 1.0), ("gauss-frozen", 1.0), ("oelm-global", 1.0), ("oelm-random", 0.2048)]:
        report = oelm.apply(gpt(512, 8, layers=2), name)
        assert report.logit_std == pytest.approx(expected, rel=0.03), name
    assert oelm.apply(gpt(512, 8, layers=2), oelm.Variant(gain=2.0)).logit_std == pytest.approx(4.0, rel=0.03)
    slices = oelm.apply(gpt(512, 8, layers=2), oelm.Variant(init="slices"))
    assert slices.logit_std == pytest.approx(1.0, rel=0.03)
    tied = oelm.apply(gpt(512, 8, layers=2), oelm.Variant(tie=True))
    assert tied.logit_std == pytest.approx(1.0, rel=0.1)
    assert oelm.apply(gpt(512, 8, layers=2), "baseline").logit_std == logit_std(gpt(512, 8, layers=2))


def test_the_spread_is_that_of_the_model_itself() -> None:
    """Against Llama's own attention weights, before the mask: log of softmax differs from logits by a row's constant."""
    import transformers

    settings = _settings(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, num_key_value_heads=4)
    config = transformers.LlamaConfig(**settings, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    report = oelm.apply(model, oelm.Variant(gain=1.5))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        weights = model(input_ids=torch.randint(3, 90, (4, 64)), output_attentions=True).attentions[0]
    rows = weights[:, :, 32:, :30].double().log()
    spread = (rows - rows.mean(-1, keepdim=True)).std()
    assert report.logit_std == pytest.approx(1.5**2, rel=0.1)
    assert float(spread) == pytest.approx(report.logit_std, rel=0.15)


def test_every_named_variant() -> None:
    frozen = {}
    for name in oelm.variants():
        model = gpt(layers=4)
        report = oelm.apply(model, name, seed=2)
        oelm.verify(model)
        frozen[name] = report.frozen
        assert json.loads(json.dumps(report.to_dict()))["variant"] == name
        assert str(report).count("\n") >= 9
        model(torch.randint(0, 64, (2, 8))).sum().backward()
    block = 4 * WIDTH * WIDTH
    ffn = 4 * (2 * WIDTH * 48 + WIDTH + 48)
    expected = dict.fromkeys(frozen, 2 * block)
    expected |= {"baseline": 0, "orth-trained": 0, "q-only": block, "k-only": block, "last-2-trained": block}
    expected |= {"qk-ffn": 2 * block + ffn, "tied-shift": block, "slices-shift": 0}
    assert frozen == expected


def test_inits() -> None:
    present = gpt()
    twin = copy.deepcopy(present)
    oelm.apply(twin, "orthogonalize-frozen")
    for before, after in zip(heads_of(present, "q"), heads_of(twin, "q"), strict=True):
        for old, new in zip(before, after, strict=True):
            q, r = torch.linalg.qr(old.double().t())
            assert torch.allclose((q * r.diag().sign()).t().float(), new, atol=1e-6)
    twin = copy.deepcopy(present)
    oelm.apply(twin, "keep-frozen")
    assert all(torch.equal(a, b) for a, b in zip(heads_of(present, "k"), heads_of(twin, "k"), strict=True))
    twin = copy.deepcopy(present)
    oelm.apply(twin, "oelm-random")
    assert torch.cat(heads_of(twin, "q")).std() == pytest.approx(0.02, rel=0.05)
    twin = copy.deepcopy(present)
    oelm.apply(twin, "oelm-global")
    whole = heads_of(twin, "q")[0].flatten(0, 1)
    assert torch.allclose(whole @ whole.t(), torch.eye(WIDTH), atol=1e-6)
    for role in ("v", "o"):
        assert all(torch.equal(a, b) for a, b in zip(heads_of(present, role), heads_of(twin, role), strict=True))


def test_values_too_can_be_drawn() -> None:
    model = gpt()
    oelm.apply(model, oelm.Variant(roles=("q", "k", "v"), gain=2.0))
    v = heads_of(model, "v")[0]
    assert torch.allclose(v @ v.transpose(1, 2), 4 * torch.eye(WIDTH // HEADS).expand(HEADS, -1, -1), atol=1e-5)
    assert all(p.weight.requires_grad == (p.role in ("v", "o")) for p in oelm.find_projections(model))


def test_one_seed_gives_one_model_and_no_global_random_number_is_used() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    before = torch.get_rng_state()
    digests = []
    for seed in (0, 0, 1):
        model = CASES["gpt2"].build()
        state_before = torch.get_rng_state()
        digests.append(oelm.apply(model, "oelm-freeze", seed=seed).digest)
        assert torch.equal(state_before, torch.get_rng_state())
    assert digests[0] == digests[1] != digests[2]
    assert before is not None


def test_biases() -> None:
    follow, train = CASES["bert"].build(), CASES["bert"].build()
    before = dict(train.named_parameters())["bert.encoder.layer.0.attention.self.query.bias"].detach().clone()
    oelm.apply(follow, "oelm-freeze")
    report = oelm.apply(train, oelm.Variant(biases="train"))
    name = "bert.encoder.layer.1.attention.self.key.bias"
    assert not dict(follow.named_parameters())[name].any()
    assert not dict(follow.named_parameters())[name].requires_grad
    bias = dict(train.named_parameters())["bert.encoder.layer.0.attention.self.query.bias"]
    assert torch.equal(bias, before)
    assert bias.requires_grad
    assert report.frozen == 2 * 3 * WIDTH * WIDTH
    kept = CASES["bert"].build()
    oelm.apply(kept, "orthogonalize-frozen")
    bias = dict(kept.named_parameters())["bert.encoder.layer.0.attention.self.query.bias"]
    assert torch.equal(bias, before)  # the original froze the pretrained biases as they were
    assert not bias.requires_grad


@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert", "torch-encoder", "gpt-neox"])
def test_tied_is_one_parameter_that_trains_as_one(name: str) -> None:
    case = CASES[name]
    model = case.build()
    oelm.apply(model, oelm.Variant(tie=True, freeze="none"))
    for q, k in zip(heads_of(model, "q"), heads_of(model, "k"), strict=True):
        assert q.data_ptr() == k.data_ptr()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    case.forward(model).square().mean().backward()
    optimizer.step()
    for q, k in zip(heads_of(model, "q"), heads_of(model, "k"), strict=True):
        assert torch.equal(q, k)
    plain = case.build()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (case.forward(plain) - case.forward(model)).abs().max() < 1e-12
    state = model.state_dict()
    pointers = [t.data_ptr() for n, t in state.items() if "embed" not in n and "head" not in n and "wte" not in n]
    assert len(set(pointers)) == len(pointers)  # files would refuse or drop tensors that share memory


def test_tie_is_refused_where_heads_differ() -> None:
    model = CASES["llama"].build()
    before = state(model)
    with pytest.raises(MethodError, match="2 key heads cannot use the matrix of 4"):
        oelm.apply(model, oelm.Variant(tie=True))
    assert unchanged(model, before)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, c in CASES.items()
        if c.plain and n in ("gpt", "gpt-gqa-bias", "gpt2", "llama", "bert", "phi3", "timm", "gpt-neox", "albert")
    ],
)
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_slices(name: str, turn: int) -> None:
    """Equal to matrices of zeros and ones, in the model and in what the plain library loads."""
    case = CASES[name]
    model = case.build()
    keys = set(model.state_dict())
    report = oelm.apply(model, oelm.Variant(init="slices", turn=turn))
    found = [m for m in model.modules() if isinstance(m, Slice)]
    assert len(found) == 2 * sum(case.stacks.values())
    assert not any(p.role in ("q", "k") for p in oelm.find_projections(model))
    assert report.rows[0].parameters == report.rows[1].parameters == 0
    assert set(model.state_dict()) == keys
    plain = case.build()
    plain.load_state_dict(model.state_dict())
    group = case.heads // case.kv_heads
    for p in oelm.find_projections(plain):
        if p.role in ("q", "k"):
            step, on = (1, 0) if p.role == "q" else (group, turn)
            for h in range(p.n_heads):
                rows = torch.zeros(p.head_dim, WIDTH, dtype=torch.float64)
                start = (h * step + on) * p.head_dim % WIDTH
                rows[:, start : start + p.head_dim] = torch.eye(p.head_dim)
                assert torch.equal(p.weight[h], rows)
    with torch.no_grad():
        assert (case.forward(plain) - case.forward(model)).abs().max() < 1e-12
    model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="reads a slice"):
        model.load_state_dict(case.build().state_dict())


@pytest.mark.parametrize("name", ["qwen3", "gemma", "deberta-v2", "torch-encoder"])
def test_slices_are_refused_where_they_cannot_be(name: str) -> None:
    model = CASES[name].build()
    before = state(model)
    with pytest.raises(MethodError, match="slice"):
        oelm.apply(model, oelm.Variant(init="slices"))
    assert unchanged(model, before)


@pytest.mark.parametrize("layers", ["first:1", "last:2", "every:2", "except-last:1", (0, -1)])
def test_layers(layers: Any) -> None:
    model = gpt(layers=4)
    chosen = oelm.Variant(layers=layers)
    report = oelm.apply(model, chosen)
    frozen = {p.layer for p in oelm.find_projections(model) if p.role in ("q", "k") and not p.weight.requires_grad}
    assert frozen == set(chosen.layer_numbers(4))
    assert report.layers == {"main": sorted(frozen)}
    assert report.logit_std_rest is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precisions_hold_the_same_draw_rounded(dtype: torch.dtype) -> None:
    exact, model = gpt().double(), gpt().to(dtype)
    oelm.apply(exact, "oelm-freeze")
    report = oelm.apply(model, "oelm-freeze")
    for a, b in zip(heads_of(exact, "q"), heads_of(model, "q"), strict=True):
        assert b.dtype == dtype
        assert torch.equal(a.float().to(dtype) if dtype != torch.float64 else a, b)
    assert report.logit_std == pytest.approx(1.0, abs=0.1)
    records = [record_of(m) for m in (exact, model)]
    assert [e.drawn for e in records[0].entries] == [e.drawn for e in records[1].entries]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_gradient_checkpointing(name: str) -> None:
    case = CASES[name]
    model = case.build()
    oelm.apply(model, "oelm-freeze")
    grads = []
    for on in (False, True):
        twin = copy.deepcopy(model).train()
        if on:
            twin.gradient_checkpointing_enable()
        for module in twin.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        case.forward(twin).square().mean().backward()
        oelm.verify(twin)
        grads.append({n: p.grad for n, p in twin.named_parameters()})
    for n, grad in grads[0].items():
        assert (grad is None) == (grads[1][n] is None), n
        assert grad is None or torch.allclose(grad, grads[1][n])


# --- refusals: one line with a remedy, and the model as it was ---


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def compiled_inside(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def twice(model: nn.Module) -> nn.Module:
    oelm.apply(model, "oelm-freeze")
    return model


def tied_projections(model: nn.Module) -> nn.Module:
    model.blocks[1].attn.k.weight = model.blocks[0].attn.k.weight
    return model


def one_memory(model: nn.Module) -> nn.Module:
    model.blocks[1].attn.k.weight = nn.Parameter(model.blocks[0].attn.v.weight.data)
    return model


def overlapping(model: nn.Module) -> nn.Module:
    both = torch.randn(2 * WIDTH, WIDTH)
    model.blocks[0].attn.q.weight = nn.Parameter(both[:WIDTH])
    model.blocks[2].mlp.up.weight = nn.Parameter(both[WIDTH - 1 :])
    return model


def shared_projection(model: nn.Module) -> nn.Module:
    model.blocks[1].attn.k = model.blocks[0].attn.k
    return model


def shared_feed_forward(model: nn.Module) -> nn.Module:
    model.blocks[1].mlp = model.blocks[0].mlp
    return model


def parametrised(model: nn.Module) -> nn.Module:
    torch.nn.utils.parametrizations.orthogonal(model.blocks[1].attn.q)
    return model


def eight_bits(model: nn.Module) -> nn.Module:
    weight = model.blocks[3].mlp.down.weight
    model.blocks[3].mlp.down.weight = nn.Parameter(weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return model


def tied_feed_forward(model: nn.Module) -> nn.Module:
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
    return model


class Linear4bit(nn.Linear):
    """Named and shaped as bitsandbytes' layer is."""


def quantised(model: nn.Module) -> nn.Module:
    model.blocks[2].attn.q = Linear4bit(WIDTH, WIDTH)
    return model


def quantised_by_torch(model: nn.Module) -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class Adapter(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def adapted(model: nn.Module) -> nn.Module:
    model.blocks[2].attn.k = Adapter(model.blocks[2].attn.k)
    return model


class FullyShardedDataParallel(nn.Module):
    """Named as torch's wrapper, which needs a process group to be made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def frozen_elsewhere(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if not name.endswith(("q.weight", "k.weight")):
            parameter.requires_grad_(False)
    return model


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.blocks[3].attn.k.weight.zero_()
    return model


@pytest.mark.parametrize(
    ("spoil", "variant", "said"),
    [
        (twice, "oelm-freeze", "converted already"),
        (compiled, "oelm-freeze", "compiled already"),
        (compiled_inside, "oelm-freeze", "compiled already"),
        (nn.DataParallel, "oelm-freeze", "apply first, wrap after"),
        (FullyShardedDataParallel, "oelm-freeze", "apply first, wrap after"),
        (adapted, "oelm-freeze", "merge or unload the adapter"),
        (lambda m: m.to("meta"), "oelm-freeze", "meta device"),
        (quantised, "oelm-freeze", "quantised"),
        (quantised_by_torch, "oelm-freeze", "quantised"),
        (tied_projections, "oelm-freeze", r"blocks.1.attn.k.weight is shared|shared with blocks.1.attn.k.weight"),
        (tied_feed_forward, "qk-ffn", "shared with"),
        (parametrised, "oelm-freeze", "blocks.1.attn.q: its weight is computed by a parametrization"),
        (eight_bits, "oelm-freeze", "blocks.3.mlp.down is a quantised layer"),
        (overlapping, "oelm-freeze", "blocks.0.attn.q.weight is shared with blocks.2.mlp.up.weight"),
        (shared_projection, "oelm-freeze", "blocks.0.attn.k.weight is shared with blocks.1.attn.k.weight"),
        (shared_feed_forward, "qk-ffn", "blocks.0.mlp.up.weight is shared with blocks.1.mlp.up.weight"),
        (one_memory, "oelm-freeze", "blocks.1.attn.k.weight is shared with blocks.0.attn.v.weight"),
        (frozen_elsewhere, "oelm-freeze", "nothing would be left to train"),
        (zeroed, "orthogonalize-frozen", r"blocks.3.attn.k.weight.*nothing to orthogonalise"),
        (lambda m: m, {"cross": True, "layers": "none"}, "matches nothing"),
        (lambda m: m, {"layers": "last:5"}, "more than the 4 layers"),
        (lambda m: m, {"layers": [4]}, "out of range for 4 layers"),
        (lambda m: m, {"layers": "none"}, "matches nothing"),
        (lambda m: m, {"layers": []}, "matches nothing"),
        (lambda m: m, "oelm-freez", "did you mean 'oelm-freeze'"),
        (lambda m: m, {"gain": -1.0}, "above 0"),
        (lambda m: m, 3, "expected a name"),
    ],
)
def test_refusals(spoil: Callable[[nn.Module], nn.Module], variant: Any, said: str) -> None:
    model = spoil(gpt())
    if any(p.is_meta for p in model.parameters()):
        with pytest.raises(MethodError, match=said):
            oelm.apply(model, variant)
        return
    before = state(model)
    with pytest.raises(ConfigError, match=said) as caught:
        oelm.apply(model, variant)
    assert "\n" not in str(caught.value)
    assert unchanged(model, before)


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5, True, "0"])
def test_bad_seeds(seed: Any) -> None:
    with pytest.raises(MethodError, match="seed"):
        oelm.apply(gpt(), "oelm-freeze", seed=seed)


def test_feed_forward_that_is_tied_is_left_alone_by_others() -> None:
    oelm.apply(tied_feed_forward(gpt()), "oelm-freeze")  # the freeze does not reach it
    oelm.apply(shared_feed_forward(gpt()), "oelm-freeze")


def test_attention_that_stands_in_two_places_is_one_layer() -> None:
    model = gpt()
    model.blocks[2].attn = model.blocks[0].attn
    report = oelm.apply(model, "oelm-freeze")
    assert report.frozen == 3 * 2 * WIDTH * WIDTH
    assert report.layers == {"main": [0, 1, 2]}
    assert any("blocks.2.attn is blocks.0.attn" in warning for warning in report.warnings)


def test_a_shared_bias_is_no_obstacle_where_biases_are_left_alone() -> None:
    model = CASES["bert"].build()
    layers = model.bert.encoder.layer
    layers[1].attention.self.query.bias = layers[0].attention.self.query.bias
    with pytest.raises(MethodError, match=r"query.bias is shared"):
        oelm.apply(model, "oelm-freeze")
    oelm.apply(model, oelm.Variant(biases="train"))


def test_a_failure_of_the_report_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from oelm.method import apply as room

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "report_on", fail)
    model = CASES["gpt2"].build()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        oelm.apply(model, "qk-ffn")
    assert unchanged(model, before)
    assert record_of(model) is None


@pytest.mark.parametrize("name", ["gpt", "gpt2", "gpt-neox", "torch-encoder", "bert", "llama"])
@pytest.mark.parametrize("variant", ["oelm-freeze", "qk-ffn", "tied-shift", "slices-shift"])
def test_a_failure_at_the_very_end_leaves_the_model_as_it_was(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oelm.method import addons

    attach = addons.attach

    def fail(*arguments: Any) -> None:
        attach(*arguments)
        raise MethodError("no")

    monkeypatch.setattr(addons, "attach", fail)
    chosen = oelm.variants()[variant]
    if not chosen.addons:
        chosen = oelm.Variant.from_dict({"base": variant, "addons": ["head-gain"]})
    model = CASES[name].build()
    before = state(model)
    with pytest.raises(MethodError):
        oelm.apply(model, chosen)
    assert unchanged(model, before)
    assert record_of(model) is None
    with torch.no_grad():
        a, b = CASES[name].forward(model), CASES[name].forward(CASES[name].build())
    assert torch.equal(a, b)


# --- verify ---


def test_verify_names_what_moved() -> None:
    for name in ("gpt", "gpt2", "bert", "torch-encoder"):
        model = CASES[name].build()
        oelm.apply(model, "oelm-freeze")
        oelm.verify(model)
        for entry in record_of(model).entries:
            parameter = dict(model.named_parameters())[entry.name]
            with torch.no_grad():
                first = parameter.view(-1)[0].clone()
                parameter.view(-1)[0] += 1e-12
            with pytest.raises(FrozenWeightsChanged, match=entry.name):
                oelm.verify(model)
            with torch.no_grad():
                parameter.view(-1)[0] = first
        oelm.verify(model)


def test_verify_sees_flags_casts_and_missing_parameters() -> None:
    def changed(change: Callable[[nn.Module], object], said: str) -> None:
        model = gpt()
        oelm.apply(model, "oelm-freeze")
        change(model)
        with pytest.raises(FrozenWeightsChanged, match=said):
            oelm.verify(model)

    changed(lambda m: m.blocks[1].attn.q.weight.requires_grad_(True), "blocks.1.attn.q.weight")
    changed(lambda m: m.bfloat16(), "was float32 at apply and is bfloat16")
    changed(lambda m: setattr(m.blocks[0].attn, "q", nn.Identity()), "no such parameter")
    changed(lambda m: m.load_state_dict(gpt().state_dict()), "not those of apply")
    with pytest.raises(MethodError, match="not converted"):
        oelm.verify(gpt())


def test_verify_sees_through_wrappers() -> None:
    model = gpt()
    oelm.apply(model, "oelm-freeze")
    holder = nn.ModuleDict({"net": model, "probe": nn.Linear(2, 2)})
    for wrapped in (torch.compile(model), nn.DataParallel(model), holder):
        oelm.verify(wrapped)
        assert record_of(wrapped) is record_of(model)
    model.blocks[0] = torch.compile(model.blocks[0])
    oelm.verify(model)
    with torch.no_grad():
        model.blocks[0]._orig_mod.attn.q.weight[0, 0] += 1
    with pytest.raises(FrozenWeightsChanged, match=r"blocks.0.attn.q.weight"):
        oelm.verify(torch.compile(model))


def test_verify_with_an_optimizer() -> None:
    model = gpt()
    stale = torch.optim.AdamW(model.parameters())  # built before apply: holds what is now frozen
    oelm.apply(model, "oelm-freeze")
    with pytest.raises(FrozenWeightsChanged, match="frozen for good but the optimiser holds it"):
        oelm.verify(model, stale)
    trains = [p for p in model.parameters() if p.requires_grad]
    oelm.verify(model, torch.optim.AdamW(trains))
    with pytest.raises(FrozenWeightsChanged, match="trains but the optimiser does not hold it"):
        oelm.verify(model, torch.optim.AdamW(trains[1:]))
    model = gpt()
    oelm.apply(model, "progressive")
    with pytest.raises(FrozenWeightsChanged, match="will thaw"):
        oelm.verify(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    oelm.verify(model, torch.optim.AdamW(model.parameters()))


def test_stale_optimizer_would_move_a_frozen_weight_and_verify_says_so() -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    model(torch.randint(0, 64, (2, 8))).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    oelm.apply(model, "keep-frozen")
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    oelm.verify(model)


# --- the record ---


def test_record_survives_json_and_says_what_the_seed_gives_again() -> None:
    model = CASES["bert"].build()
    oelm.apply(model, "qk-ffn", seed=5)
    record = record_of(model)
    again = Record.from_dict(json.loads(json.dumps(record.to_dict())))
    assert again.to_dict() == record.to_dict()
    assert again.variant == oelm.variants()["qk-ffn"]
    assert again.digest() == record.digest()
    q = "bert.encoder.layer.0.attention.self.query.weight"
    assert q in record.regenerable
    assert record.entry(q).present == digest(dict(model.named_parameters())[q])
    assert "bert.encoder.layer.0.intermediate.dense.weight" in record.frozen
    assert "bert.encoder.layer.0.intermediate.dense.weight" not in record.regenerable
    oelm.apply(kept := CASES["bert"].build(), "orthogonalize-frozen")
    assert record_of(kept).regenerable == ()
    for damaged in ({}, {"schema": 2}, record.to_dict() | {"entries": [{}]}, record.to_dict() | {"seed": "x"}):
        with pytest.raises(oelm.OelmError):
            Record.from_dict(damaged)


def test_digest_is_of_the_bytes() -> None:
    a = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest(a) == digest(a.t().contiguous().t())
    assert len({digest(a), digest(a.double()), digest(a.reshape(3, 2)), digest(-a), digest(a.bfloat16())}) == 5
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.empty(0))


def test_converted_models_can_be_copied_and_pickled() -> None:
    for name in ("gpt", "gpt2", "torch-encoder", "gpt-neox"):
        model = CASES[name].build()
        oelm.apply(model, oelm.Variant(tie=True))
        twin = copy.deepcopy(model)
        oelm.verify(twin)
        assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in model.parameters()})
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        oelm.verify(loaded)
        with torch.no_grad():
            for other in (twin, loaded):
                assert torch.equal(CASES[name].forward(other), CASES[name].forward(model))


def test_convert_on_meta_counts_what_apply_counts() -> None:
    for name in ("gpt2", "bert", "llama", "torch-encoder", "t5"):
        for variant in ("oelm-freeze", "qk-ffn", "orth-trained"):
            real, meta = CASES[name].build(), CASES[name].build().to("meta")
            report = oelm.apply(real, variant)
            record = convert(meta, variant)
            assert sum(p.numel() for p in meta.parameters() if not p.requires_grad) == report.frozen
            assert [e.name for e in record.entries] == [e.name for e in record_of(real).entries]
            shapes = {n: p.shape for n, p in meta.named_parameters()}
            assert all(shapes[n] == p.shape for n, p in real.named_parameters())


def test_memory_of_the_fused_matrix_is_let_go() -> None:
    model = CASES["gpt2"].build()
    oelm.apply(model, "oelm-freeze")
    for module in model.modules():
        if isinstance(module, SplitProjection):
            assert all(p is None for p in module.__dict__["shell"]._parameters.values())


def test_fuse_gives_the_familys_own_modules_back() -> None:
    model = CASES["gpt-neox"].build()
    oelm.apply(model, "oelm-freeze")
    fuse(model)
    assert record_of(model) is None
    assert type(model.gpt_neox.layers[0].attention.query_key_value) is nn.Linear
    q = next(p for p in oelm.find_projections(model) if p.role == "q")
    assert torch.allclose(q.weight @ q.weight.transpose(1, 2), torch.eye(8, dtype=torch.float64).expand(4, 8, 8))


def test_t5_is_warned_about_its_unscaled_logits() -> None:
    report = oelm.apply(CASES["t5"].build(), "oelm-freeze")
    assert any("does not divide its logits" in warning for warning in report.warnings)
    assert report.logit_std == pytest.approx(math.sqrt(8), rel=0.1)
    report = oelm.apply(CASES["qwen3"].build(), "oelm-freeze")
    assert any("normalised after projection" in warning for warning in report.warnings)
    report = oelm.apply(CASES["albert"].build(), "oelm-freeze")
    assert any("3 layers share 1 set" in warning for warning in report.warnings)
    assert "warning: " in str(report)
