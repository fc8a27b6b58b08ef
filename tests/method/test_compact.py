"""Compact checkpoints, restore and export: equal to the last bit, or refused by name with the model as it was."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo import CASES

import oelm
from oelm.errors import CheckpointError, FrozenWeightsChanged, MethodError, OelmError
from oelm.method.apply import fuse
from oelm.method.compact import save_pretrained
from oelm.models.gpt import GPT
from oelm.models.shapes import PRESETS, Shape


TINY = Shape(width=32, layers=2, heads=4, hidden=48, vocab=50, context=16, dropout=0.0)
FAMILIES = ["gpt", "gpt2", "gpt-neox", "llama", "bert", "t5", "torch-encoder", "falcon-groups", "albert"]


def gpt(seed: int = 0) -> GPT:
    return GPT(TINY, seed=seed)


def saved(path: Path, variant: oelm.Variant | str = "oelm-freeze", seed: int = 7) -> GPT:
    """A converted model after a few steps, and its compact folder at `path`."""
    model = gpt()
    oelm.apply(model, variant, seed=seed)
    optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-2))
    for _ in range(2):
        model.logits(model(torch.randint(50, (2, 8)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    oelm.save_compact(model, path)
    return model


def state(model: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    return {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)}


def same(a: nn.Module, b: nn.Module) -> None:
    one, two = state(a), state(b)
    assert one.keys() == two.keys()
    for name, (value, trains) in one.items():
        assert torch.equal(value, two[name][0]), name
        assert trains == two[name][1], name


def test_gpt_512_is_smaller_by_exactly_its_matrices(tmp_path: Path) -> None:
    model = GPT(PRESETS["gpt-512"])
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    oelm.apply(model, "oelm-freeze")
    oelm.save_compact(model, tmp_path / "c")
    kept = sum(t.numel() * t.element_size() for t in load_file(tmp_path / "c" / "model.safetensors").values())
    assert full - kept == 12_582_912
    fresh = GPT(PRESETS["gpt-512"], seed=1)
    oelm.load_compact(fresh, tmp_path / "c")
    same(model, fresh)


@pytest.mark.parametrize(
    "variant",
    sorted(oelm.variants()),
)
def test_every_variant_comes_back_into_plain_and_converted_models(tmp_path: Path, variant: str) -> None:
    if variant == "last-2-trained":
        variant = oelm.Variant(layers="except-last:1")  # type: ignore[assignment]  # there are but two
    model = saved(tmp_path / "c", variant)
    plain = gpt(seed=3)
    oelm.load_compact(plain, tmp_path / "c")
    same(model, plain)
    oelm.verify(plain)
    converted = gpt(seed=4)
    oelm.apply(converted, variant, seed=7)
    oelm.load_compact(converted, tmp_path / "c")
    same(model, converted)
    x = torch.randint(50, (2, 9))
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_comes_back(tmp_path: Path, name: str) -> None:
    model = CASES[name].build()
    fresh = CASES[name].build()
    oelm.apply(model, "oelm-freeze", seed=2)
    oelm.save_compact(model, tmp_path / "c")
    oelm.load_compact(fresh, tmp_path / "c")
    same(model, fresh)
    assert torch.equal(CASES[name].forward(model), CASES[name].forward(fresh))


def test_what_has_thawed_is_saved_and_trains_again(tmp_path: Path) -> None:
    model = gpt()
    oelm.apply(model, oelm.Variant(thaw=oelm.Thaw(start=1, end=3)))
    oelm.schedule(model).step(1)
    with torch.no_grad():
        model.blocks[1].attn.q.weight.add_(1.0)
    oelm.save_compact(model, tmp_path / "c")
    names = set(load_file(tmp_path / "c" / "model.safetensors"))
    assert "blocks.1.attn.q.weight" in names
    assert "blocks.0.attn.q.weight" not in names
    fresh = gpt(seed=2)
    oelm.load_compact(fresh, tmp_path / "c")
    same(model, fresh)


def test_what_no_seed_gives_is_stored(tmp_path: Path) -> None:
    saved(tmp_path / "c", "orthogonalize-frozen")
    assert len(load_file(tmp_path / "c" / "model.safetensors")) == len(dict(gpt().named_parameters()))


def test_the_record_says_what_and_from_what(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    data = json.loads((tmp_path / "c" / "oelm.json").read_text())
    assert data["variant"] == oelm.variants()["oelm-freeze"].to_dict()
    assert data["seed"] == 7
    assert {"torch", "numpy", "oelm"} <= data["versions"].keys()
    assert all(len(entry["present"]) == 64 for entry in data["entries"])
    assert len(data["files"]["model.safetensors"]["sha256"]) == 64


def test_saving_again_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    model = saved(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    fresh = gpt(seed=3)
    oelm.load_compact(fresh, tmp_path / "c")
    same(model, fresh)


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import oelm.method.compact as compact

    model = saved(tmp_path / "c")

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compact, "save_file", full_disk)
    with pytest.raises(OelmError, match="No space left"):
        oelm.save_compact(model, tmp_path / "c")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    oelm.load_compact(gpt(), tmp_path / "c")


def test_foreign_folders_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    model = gpt()
    oelm.apply(model, "oelm-freeze")
    with pytest.raises(CheckpointError, match="no oelm checkpoint"):
        oelm.save_compact(model, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_changed_frozen_weights_are_not_saved(tmp_path: Path) -> None:
    model = gpt()
    oelm.apply(model, "oelm-freeze")
    with torch.no_grad():
        model.blocks[0].attn.q.weight[0, 0] += 1
    with pytest.raises(FrozenWeightsChanged, match=r"blocks\.0\.attn\.q\.weight"):
        oelm.save_compact(model, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def edit(path: Path, change: object) -> None:
    data = json.loads(path.read_text())
    change(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


DAMAGE = {
    "tensors truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]),
        "truncated",
    ),
    "tensors flipped": (lambda d: flip(d / "model.safetensors", -5), "SHA-256"),
    "header flipped": (lambda d: flip(d / "model.safetensors", 20), "SHA-256"),
    "tensors gone": (lambda d: (d / "model.safetensors").unlink(), "missing"),
    "record gone": (lambda d: (d / "oelm.json").unlink(), "no oelm.json"),
    "record truncated": (lambda d: (d / "oelm.json").write_text((d / "oelm.json").read_text()[:300]), "not JSON"),
    "record empty": (lambda d: (d / "oelm.json").write_text("{}"), "schema"),
    "record a list": (lambda d: (d / "oelm.json").write_text("[]"), "schema"),
    "another seed": (lambda d: edit(d / "oelm.json", lambda x: x.update(seed=8)), r"blocks\.0\.attn\.q\.weight"),
    "another gain": (lambda d: edit(d / "oelm.json", lambda x: x["variant"].update(gain=2.0)), r"blocks\.0\.attn\.q"),
    "another hash": (
        lambda d: edit(d / "oelm.json", lambda x: x["entries"][1].update(present="0" * 64)),
        r"attn\.k\.weight",
    ),
    "unknown variant key": (lambda d: edit(d / "oelm.json", lambda x: x["variant"].update(magic=1)), "magic"),
    "edited versions": (lambda d: edit(d / "oelm.json", lambda x: x["versions"].update(torch="9")), "checksum"),
    "no left_out": (lambda d: edit(d / "oelm.json", lambda x: x.pop("left_out")), "damaged"),
    "stranger left out": (
        lambda d: edit(d / "oelm.json", lambda x: x["left_out"].append("head.weight")),
        r"head\.weight",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("converted", [False, True])
def test_damage_is_refused_in_one_line_and_the_model_is_as_it_was(tmp_path: Path, kind: str, converted: bool) -> None:
    saved(tmp_path / "c")
    damage, message = DAMAGE[kind]
    damage(tmp_path / "c")
    model = gpt(seed=5)
    if converted:
        oelm.apply(model, "oelm-freeze", seed=7)
    before = state(model)
    if converted and kind in ("another seed", "another gain"):
        message = "load into a fresh model"
    with pytest.raises(OelmError, match=message) as caught:
        oelm.load_compact(model, tmp_path / "c")
    assert "\n" not in str(caught.value)
    after = state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n][0], after[n][0]) and before[n][1] == after[n][1] for n in before)
    if not converted:
        oelm.apply(model, "baseline")  # refused, had it been converted


def test_tensors_of_another_run_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    saved(tmp_path / "b", seed=8)
    shutil.copy(tmp_path / "b" / "model.safetensors", tmp_path / "a" / "model.safetensors")
    with pytest.raises(CheckpointError, match="another run"):
        oelm.load_compact(gpt(), tmp_path / "a")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (TINY.changed(layers=3), "not in the file"),
        (TINY.changed(layers=1), "in this model|not in the model|cannot be drawn"),
        (TINY.changed(hidden=64), "mlp"),
        (TINY.changed(heads=2), "another hash|shape"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, shape: Shape, message: str) -> None:
    saved(tmp_path / "c")
    model = GPT(shape)
    before = state(model)
    with pytest.raises(CheckpointError, match=message):
        oelm.load_compact(model, tmp_path / "c")
    assert all(torch.equal(before[n][0], v) for n, (v, _) in state(model).items())


def test_another_precision_is_refused_with_the_remedy(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    with pytest.raises(CheckpointError, match="cast the model"):
        oelm.load_compact(gpt().bfloat16(), tmp_path / "c")


def test_half_precision_comes_back(tmp_path: Path) -> None:
    model = gpt().bfloat16()
    oelm.apply(model, "oelm-freeze")
    oelm.save_compact(model, tmp_path / "c")
    fresh = gpt(seed=2).bfloat16()
    oelm.load_compact(fresh, tmp_path / "c")
    same(model, fresh)


def test_unconverted_models_have_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="not converted"):
        oelm.save_compact(gpt(), tmp_path / "c")


# Beside the files of other libraries


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt-neox", "llama", "bert", "t5", "phi3", "falcon-groups", "bloom", "albert"]
)
def test_exports_load_in_plain_transformers_with_equal_logits(tmp_path: Path, name: str) -> None:
    model = CASES[name].build()
    oelm.apply(model, "oelm-freeze", seed=3)
    save_pretrained(model, tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert {n for n, _ in plain.named_parameters()} == {n for n, _ in CASES[name].build().named_parameters()}
    torch.testing.assert_close(CASES[name].forward(plain), CASES[name].forward(model), rtol=0, atol=1e-12)
    assert all(p.requires_grad for p in plain.parameters())
    oelm.restore(plain, tmp_path)
    same(model, plain)
    oelm.verify(plain)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("passed_on", [lambda model: model, copy.deepcopy, through_pickle])
def test_the_models_own_save_pretrained_writes_what_restore_needs(tmp_path: Path, passed_on: Callable) -> None:
    model = CASES["gpt2"].build()
    oelm.apply(model, "oelm-freeze", seed=3)
    passed_on(model).save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(p.requires_grad for p in plain.parameters())
    oelm.restore(plain, tmp_path)
    same(model, plain)
    plain.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "oelm.json").is_file()


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_the_model_inside_a_wrapper_is_saved_under_its_own_names(tmp_path: Path, name: str) -> None:
    inner = CASES[name].build()
    wrapper = nn.Sequential(inner)
    oelm.apply(wrapper, "oelm-freeze", seed=3)
    oelm.save_pretrained(wrapper, tmp_path)
    plain = type(inner).from_pretrained(tmp_path, dtype=torch.float64)
    oelm.restore(plain, tmp_path)
    same(inner, plain)
    assert all(e["name"] in state(plain) for e in json.loads((tmp_path / "oelm.json").read_text())["entries"])


def test_only_the_first_process_and_only_a_converted_model_write_a_record(tmp_path: Path) -> None:
    model = CASES["bert"].build()
    oelm.apply(model, "oelm-freeze")
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    fuse(model).save_pretrained(tmp_path / "fused")
    assert "save_pretrained" not in vars(model)
    plain = CASES["bert"].build().requires_grad_(False)
    with pytest.raises(MethodError, match="left to train"):
        oelm.apply(plain, "baseline")
    assert "save_pretrained" not in vars(plain)
    plain.save_pretrained(tmp_path / "plain")
    assert not list(tmp_path.glob("*/oelm.json"))


@pytest.mark.parametrize("variant", ["tied", "slices", "keep-frozen", "qk-ffn"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_ties_slices_and_frozen_feed_forwards_export_too(tmp_path: Path, name: str, variant: str) -> None:
    chosen: object = {"tied": oelm.Variant(tie=True), "slices": oelm.Variant(init="slices", turn=1)}.get(
        variant, variant
    )
    model = CASES[name].build()
    oelm.apply(model, chosen, seed=3)
    save_pretrained(model, tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(CASES[name].forward(plain), CASES[name].forward(model), rtol=0, atol=1e-12)
    oelm.restore(plain, tmp_path)
    same(model, plain)
    torch.testing.assert_close(CASES[name].forward(plain), CASES[name].forward(model), rtol=0, atol=1e-12)


def test_restore_refuses_other_weights_and_leaves_the_model_plain(tmp_path: Path) -> None:
    model = CASES["gpt2"].build()
    oelm.apply(model, "oelm-freeze", seed=3)
    save_pretrained(model, tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        plain.transformer.h[1].attn.c_attn.weight[0, 0] += 1
    names = [n for n, _ in plain.named_parameters()]
    with pytest.raises(FrozenWeightsChanged, match=r"h\.1\.attn\.c_attn\.q\.weight"):
        oelm.restore(plain, tmp_path)
    assert [n for n, _ in plain.named_parameters()] == names
    with pytest.raises(CheckpointError, match="float32"):
        oelm.restore(plain.float(), tmp_path)


def test_restore_and_load_compact_point_to_each_other(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    with pytest.raises(CheckpointError, match="load_compact"):
        oelm.restore(gpt(), tmp_path / "c")
    model = CASES["bert"].build()
    oelm.apply(model, "oelm-freeze")
    save_pretrained(model, tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"oelm\.restore"):
        oelm.load_compact(CASES["bert"].build(), tmp_path / "full")
    with pytest.raises(MethodError, match="converted already"):
        oelm.restore(model, tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"no oelm\.json"):
        oelm.restore(CASES["bert"].build(), tmp_path)


def test_exports_say_before_saving_what_they_cannot_hold(tmp_path: Path) -> None:
    model = CASES["bert"].build()
    oelm.apply(model, oelm.Variant(addons=("head-gain",)))
    with pytest.raises(MethodError, match="add-ons head-gain"):
        save_pretrained(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    ours = gpt()
    oelm.apply(ours, "oelm-freeze")
    with pytest.raises(MethodError, match="no Hugging Face model"):
        save_pretrained(ours, tmp_path / "x")


def test_a_compact_folder_holds_addons_of_foreign_models(tmp_path: Path) -> None:
    model = CASES["llama"].build()
    plain = copy.deepcopy(model)
    oelm.apply(model, oelm.Variant(addons=("shift-keys", "head-gain")))
    with torch.no_grad():
        model.model.layers[0].self_attn.addons.shift.normal_()
    oelm.save_compact(model, tmp_path / "c")
    oelm.load_compact(plain, tmp_path / "c")
    same(model, plain)
    assert torch.equal(CASES["llama"].forward(model), CASES["llama"].forward(plain))
