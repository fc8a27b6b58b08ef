"""Counts against closed forms and against models that were really built."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo import CASES

import oelm
from oelm.cli.inspect import empty_model
from oelm.errors import MethodError
from oelm.models.gpt import GPT
from oelm.models.shapes import Shape


SLOW = pytest.mark.slow
TINY = Shape(width=32, layers=2, heads=4, hidden=64, vocab=50, context=16, dropout=0.0)


def test_gpt_512() -> None:
    found = oelm.account(empty_model("gpt-512"), variant="oelm-freeze")
    assert (found.parameters.total, found.parameters.frozen) == (44_896_768, 3_145_728)
    assert f"{100 * found.parameters.frozen_share:.2f}" == "7.01"
    assert found.bytes.checkpoint_full - found.bytes.checkpoint_compact == 12_582_912
    assert found.bytes.training_checkpoint == 12 * 41_751_040 + 4 * 3_145_728
    assert found.flops is not None
    assert found.flops.length == 512
    assert f"{100 * found.flops.saved_share:.1f}" == "2.2"
    assert f"{100 * found.flops.saved_share_causal:.1f}" == "2.3"
    # by hand: products of 2abc; 12 d^2 a layer, the head, and attention's two products
    matrices, d, n, layers = 6 * 12 * 512**2 + 512 * 50257, 512, 512, 6
    forward = 2 * n * matrices + layers * 4 * n * n * d
    assert found.flops.forward == forward
    assert found.flops.all_trained == 3 * forward
    assert found.flops.saved == 2 * n * 3_145_728
    assert found.flops.attention == 3 * layers * 4 * n * n * d


@pytest.mark.parametrize(("length", "share"), [(128, "5.4"), (512, "5.0")])
def test_bert_base(length: int, share: str) -> None:
    found = oelm.account(empty_model("bert-base"), variant="oelm-freeze", length=length)
    p = found.parameters
    assert (p.total, p.trainable, p.frozen) == (109_484_547, 95_310_339, 14_174_208)
    assert found.flops is not None
    assert f"{100 * found.flops.saved_share:.1f}" == share
    assert found.flops.saved_share_causal is None
    assert f"length {length}" in str(found)


@pytest.mark.parametrize(
    "name", ["gpt", "gpt2", "t5", *(pytest.param(n, marks=SLOW) for n in ("bert", "llama", "albert"))]
)
@pytest.mark.parametrize(
    "variant", ["oelm-freeze", "progressive", *(pytest.param(n, marks=SLOW) for n in ("qk-ffn", "baseline"))]
)
def test_what_a_variant_would_do_is_what_it_does(name: str, variant: str) -> None:
    model = CASES[name].build()
    before = [(n, p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()]
    planned = oelm.account(model, variant=variant, length=8).to_dict()
    assert [(n, p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()] == before
    oelm.apply(model, variant)
    done = oelm.account(model, length=8).to_dict()
    assert done == planned
    assert done["parameters"]["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert done["parameters"]["total"] == sum(p.numel() for p in model.parameters())


def test_flops_are_those_of_the_real_pass() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = GPT(TINY)
    oelm.apply(model, "oelm-freeze")
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model.logits(model(torch.randint(50, (3, 16)))).sum().backward()
    found = oelm.account(model, length=16, batch=3).flops
    assert found is not None
    assert found.total == counter.get_total_flops()


def test_addons_ties_and_slices_are_counted() -> None:
    tied = oelm.account(GPT(TINY), variant="tied-shift")
    assert tied.parameters.frozen == 2 * 32 * 32
    assert tied.parameters.addons == 2 * (4 + 32)
    slices = oelm.account(GPT(TINY), variant="slices-shift")
    assert slices.parameters.total == sum(p.numel() for p in GPT(TINY).parameters()) - 4 * 32 * 32 + 2 * 64
    assert slices.flops is not None
    assert slices.flops.saved == 3 * 2 * 16 * 4 * 32 * 32  # forward too


def test_thawing_is_told_apart() -> None:
    found = oelm.account(GPT(TINY), variant="progressive")
    assert found.parameters.thawing == found.parameters.frozen == 4 * 32 * 32
    assert "until the thaw" in str(found)


def test_a_table_warns_of_claims_above_the_ceiling() -> None:
    found = oelm.account(GPT(TINY), variant="oelm-freeze")
    assert "fault of measurement" in str(found)
    data = found.to_dict()
    assert data["ceilings"]["largest"] == max(
        v for k, v in data["ceilings"].items() if k != "largest" and v is not None
    )
    assert "far above both" in str(found)
    assert data["ceilings"]["time"] is None
    assert "time is not FLOPs" in str(found)
    assert "fault" not in str(oelm.account(GPT(TINY), variant="baseline"))


def test_inputs_that_cannot_be_guessed_can_be_given() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    unknown = oelm.account(model, variant="oelm-freeze")
    assert unknown.flops is None
    assert any("give inputs=" in note for note in unknown.notes)
    make = lambda batch, length: {"src": torch.empty(batch, length, 32, device="meta")}  # noqa: E731
    found = oelm.account(model, variant="oelm-freeze", length=8, inputs=make)
    assert found.parameters.frozen == 2 * 2 * (32 * 32 + 32)
    assert found.flops is not None
    assert found.flops.saved == 2 * 8 * 4 * 32 * 32


def test_a_pass_that_needs_values_leaves_the_rest_standing() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GPT(TINY)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs) if inputs.sum().item() >= 0 else inputs

    make = lambda batch, length: {"inputs": torch.zeros(batch, length, dtype=torch.long, device="meta")}  # noqa: E731
    found = oelm.account(Choosy(), variant="oelm-freeze", length=8, inputs=make)
    assert found.flops is None
    assert found.parameters.frozen == 4 * 32 * 32
    assert any("FLOPs not counted" in note for note in found.notes)
    assert found.to_dict()["ceilings"]["flops"] is None


@pytest.mark.parametrize("wrong", [{"length": 0}, {"length": 1.5}, {"batch": 0}, {"batch": True}])
def test_impossible_sizes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(MethodError, match="whole number"):
        oelm.account(GPT(TINY), variant="oelm-freeze", **wrong)


def test_a_converted_model_takes_no_second_variant() -> None:
    model = GPT(TINY)
    oelm.apply(model, "oelm-freeze")
    with pytest.raises(MethodError, match="converted already"):
        oelm.account(model, variant="baseline")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart-base", "gpt-512-classifier", "gpt2-small", "minilm", "t5-small"])
def test_presets_are_counted(name: str) -> None:
    found = oelm.account(empty_model(name), variant="oelm-freeze", length=64)
    assert found.flops is not None
    assert 0 < found.flops.saved_share < 0.1
    assert 0 < found.parameters.frozen_share < 0.5


def test_the_ceiling_of_time_is_measured_and_the_table_says_so() -> None:
    model = GPT(TINY)
    before = {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    found = oelm.account(model, variant="tied-shift", length=16, batch=4, time=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n][0]) and p.requires_grad == before[n][1] for n, p in model.named_parameters())
    assert found.time is not None
    saved = found.time.products_seconds + found.time.optimizer_seconds
    assert 0 < saved < found.time.step_seconds
    share = found.to_dict()["ceilings"]["time"]
    assert share == saved / (saved + found.time.step_seconds)
    assert f"{100 * share:.1f} % of the time measured here" in str(found)
    with pytest.raises(MethodError, match="on the meta device; build it first"):
        oelm.account(empty_model("gpt-tiny"), variant="oelm-freeze", time=True)


@pytest.mark.parametrize(
    ("variant", "shapes"),
    [
        ("oelm-freeze", [(32, 32, 4)]),
        ("tied-shift", [(32, 32, 2)]),  # one matrix a layer
        ("slices-shift", [(32, 32, 12)]),  # forward and both backward
        ("baseline", []),
        ("qk-ffn", [(32, 32, 4), (64, 32, 2), (32, 64, 2)]),
    ],
)
def test_what_a_step_leaves_out_is_timed_product_by_product(
    variant: str, shapes: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import oelm.method.timing as timing

    model = GPT(TINY)
    oelm.apply(model, variant)
    tokens = 7
    # a clock that tells a call's multiplications: what it cannot see, AdamW's, is 0
    monkeypatch.setattr(timing, "_seconds", lambda call, replayed=False: float(timing_flops(call)))
    assert timing.left_out(model, tokens, torch.float32) == (sum(2 * tokens * a * b * n for a, b, n in shapes), 0.0)


def timing_flops(call: object) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()  # type: ignore[operator]
    return counter.get_total_flops()


def test_experts_are_counted_as_far_as_they_are_used() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    d, hidden, experts, n, vocab = 32, 48, 4, 16, 96
    config = MixtralConfig(
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    found = oelm.account(model, variant="oelm-freeze", length=n).flops
    assert found is not None
    attention = 2 * n * (2 * d * d + 2 * d * d // 2) + 4 * n * n * d
    mixture = 2 * n * d * experts + 2 * (2 * n * 3 * d * hidden)
    assert found.forward == 2 * (attention + mixture) + 2 * n * d * vocab
    assert found.saved == 2 * 2 * n * (d * d + d * d // 2)
