"""Every family: found as it is, split without a change, drawn, frozen, trained, saved under its usual keys."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from zoo import CASES, Case

import oelm
from oelm.method.apply import fuse
from oelm.method.split import SplitMultiheadAttention, SplitProjection


logging.getLogger("transformers").setLevel(logging.ERROR)

QUICK = ("gpt", "gpt2", "gpt-neox", "llama", "phi3", "falcon-groups", "bert", "albert", "t5", "timm", "torch-encoder")
HUB = [name for name in CASES if not name.startswith(("gpt-gqa", "timm", "torch")) and name != "gpt"]


def params(names: list[str]) -> list[object]:
    """Some families each day, all of them with the slow tests."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


EVERY = pytest.mark.parametrize("name", params(list(CASES)))


def outputs(case: Case, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return case.forward(model)


def counted(projections: list[oelm.Projection]) -> dict[str, int]:
    layers: dict[str, set[int]] = {}
    for p in projections:
        layers.setdefault(p.stack, set()).add(p.layer)
    return {stack: len(numbers) for stack, numbers in layers.items()}


@EVERY
def test_what_is_found(name: str) -> None:
    case = CASES[name]
    model = case.build()
    found = oelm.find_projections(model)
    assert counted(found) == case.stacks
    parameters = dict(model.named_parameters())
    for p in found:
        assert p.name in parameters
        if p.role == "o":
            continue
        assert p.n_heads == (case.heads if p.role == "q" else case.kv_heads)
        assert p.head_dim == case.head_dim
        assert p.weight.shape[:2] == (p.n_heads, p.head_dim)
    assert {p.role for p in found} == {"q", "k", "v", "o"}


@EVERY
def test_splitting_changes_no_output_and_no_key(name: str) -> None:
    case = CASES[name]
    model = case.build()
    before, keys = outputs(case, model), {k: v.clone() for k, v in model.state_dict().items()}
    oelm.apply(model, oelm.Variant(init="keep", cross=True))
    assert (outputs(case, model) - before).abs().max() <= 1e-12
    split = [m for m in model.modules() if isinstance(m, SplitProjection | SplitMultiheadAttention)]
    assert bool(split) == case.fused
    after = model.state_dict()
    assert set(after) == set(keys)
    assert all(torch.equal(after[k], keys[k]) for k in keys)
    plain = case.build()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    plain.load_state_dict(after)
    assert (outputs(case, plain) - before).abs().max() <= 1e-12
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(keys)
    assert (outputs(case, model) - before).abs().max() <= 1e-12
    oelm.verify(model)
    fuse(model)
    assert not any(isinstance(m, SplitProjection | SplitMultiheadAttention) for m in model.modules())
    assert (outputs(case, model) - before).abs().max() <= 1e-12


def silence(model: nn.Module, role: str, group: int | None, value: float = 0.0) -> None:
    """Fill one role's matrices and biases with a value (0) or with noise, of one key head's group or of all heads."""
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(8)
    for p in oelm.find_projections(model):
        if p.role != role:
            continue
        groups = next(q.n_heads for q in oelm.find_projections(model) if q.role == "k")
        per_group = p.n_heads // groups
        chosen = slice(None) if group is None else slice(group * per_group, (group + 1) * per_group)
        bias = parameters.get(p.name[: -len("weight")] + "bias")
        with torch.no_grad():
            noise = torch.randn(p.weight[chosen].shape, generator=generator, dtype=p.weight.dtype)
            p.weight[chosen] = value * noise
            if bias is not None:
                bias.view(p.n_heads, p.head_dim)[chosen] = value * noise[..., 0]


@pytest.mark.parametrize("name", params([n for n in CASES if n not in ("phi", "deberta-v2")]))
@pytest.mark.parametrize("group", [None, -1])
def test_roles_and_heads_are_what_they_are_called(name: str, group: int | None) -> None:
    """A head without a query listens everywhere alike, whatever its key; without values it says nothing.

    Equal outputs after splitting would not show a query taken for a key. Phi's and DeBERTa-v2's zero query is not
    silent: a norm's bias and projected positions stand beside it.
    """
    case = CASES[name]
    if name == "olmo2" and group is not None:
        pytest.skip("its norm of queries and keys runs over all heads, so one head's noise reaches the others")
    group = case.kv_heads - 1 if group == -1 else group
    model = case.build()
    oelm.apply(model, oelm.Variant(init="keep", cross=True))
    everything = outputs(case, model)
    silence(model, "q", group)
    deaf = outputs(case, model)
    assert (deaf - everything).abs().max() > 1e-9
    silence(model, "k", group, 2.0)
    assert (outputs(case, model) - deaf).abs().max() < 1e-10
    model = case.build()
    oelm.apply(model, oelm.Variant(init="keep", cross=True))
    silence(model, "v", group)
    mute = outputs(case, model)
    assert (mute - everything).abs().max() > 1e-9
    silence(model, "q", group, 2.0)
    silence(model, "k", group, 2.0)
    assert (outputs(case, model) - mute).abs().max() < 1e-10


@EVERY
def test_orthogonal_and_frozen(name: str) -> None:
    """By our own formula; gradients reach everything that is not frozen."""
    case = CASES[name]
    model = case.build()
    report = oelm.apply(model, oelm.Variant(cross=True), seed=3)
    eye = torch.eye(case.head_dim, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    theirs = {n for n, p in case.build().named_parameters() if not p.requires_grad}  # Whisper's sinusoids
    frozen: set[str] = set()
    for p in oelm.find_projections(model):
        if p.role in ("q", "k"):
            block = p.weight.detach()
            assert (block @ block.transpose(1, 2) - eye).abs().max() < 1e-12
            frozen.add(p.name)
            bias = p.name[: -len("weight")] + "bias"
            if bias in parameters:
                frozen.add(bias)
                assert not parameters[bias].any()
    assert case.bias == any(n.endswith("bias") for n in frozen)
    assert {n for n, p in parameters.items() if not p.requires_grad} == frozen | theirs
    assert report.frozen == sum(parameters[n].numel() for n in frozen | theirs)
    model.train()
    case.forward(model).double().square().mean().backward()
    for n, p in parameters.items():
        assert (p.grad is None) if n in frozen | theirs else (p.grad is not None or not _used(n)), n


def _used(name: str) -> bool:
    """A pooler without a classifier gets no gradient in the plain library either."""
    return "pooler" not in name


@EVERY
def test_adamw_with_decay_moves_no_frozen_bit(name: str) -> None:
    case = CASES[name]
    model = case.build()
    freeze = "qk" if name.startswith("torch-attention") else "qk+ffn"
    oelm.apply(model, oelm.Variant(cross=True, freeze=freeze))
    model.train()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    moving = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)
    for _ in range(20 if name in QUICK else 5):
        optimizer.zero_grad()
        case.forward(model).double().square().mean().backward()
        optimizer.step()
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], values) for n, values in frozen.items())
    assert all(not torch.equal(now[n], values) for n, values in moving.items() if _used(n))
    oelm.verify(model, optimizer)


@EVERY
def test_feed_forward_is_frozen_beside_qk(name: str) -> None:
    case = CASES[name]
    model = case.build()
    if name.startswith("torch-attention"):
        with pytest.raises(oelm.OelmError, match="no feed-forward"):
            oelm.apply(model, "qk-ffn")
        return
    report = oelm.apply(model, "qk-ffn")
    row = next(r for r in report.rows if r.role == "ffn")
    blocks = sum(n for stack, n in case.stacks.items() if not stack.endswith(".cross"))
    assert row.trainable == 0
    assert row.matched in (2 * blocks, 3 * blocks)  # up and down, or gate, up and down
    assert row.frozen >= 2 * blocks * 32 * 48


@pytest.mark.parametrize("name", params(HUB))
def test_saved_and_loaded_by_the_plain_library(name: str, tmp_path: object) -> None:
    import transformers

    case = CASES[name]
    model = case.build()
    oelm.apply(model, "oelm-freeze", seed=1)
    before = outputs(case, model)
    model.save_pretrained(str(tmp_path))
    plain, loading = type(model).from_pretrained(str(tmp_path), output_loading_info=True, dtype=torch.float64)
    assert isinstance(plain, transformers.PreTrainedModel)
    assert not any(loading[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # Gemma scales its embeddings by a number that it rounds to the precision it is built in
    assert (outputs(case, plain.eval()) - before).abs().max() <= (1e-5 if "gemma" in name else 1e-12)
    assert all(p.requires_grad for p in plain.parameters())
