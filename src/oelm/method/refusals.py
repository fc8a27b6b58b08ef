"""What `apply` refuses before it changes anything, each in one line with the remedy."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from oelm.errors import MethodError
from oelm.method.families import is_quantised
from oelm.method.projections import Site, shared_modules, shared_names
from oelm.method.record import record_of
from oelm.method.split import ROLES
from oelm.method.variant import Variant


def refuse_model(model: nn.Module) -> None:
    """What can be seen to be wrong before the projections are looked for."""
    if not isinstance(model, nn.Module):
        raise MethodError(f"apply: expected a torch.nn.Module, got {type(model).__name__}")
    present = record_of(model)
    if present is not None:
        raise MethodError(
            f"apply: this {present.model} is converted already (seed {present.seed}); build or load a fresh model"
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{name} is" if name else "the model is"
        if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
            raise MethodError(f"apply: {where} wrapped in {kind} already; apply first, wrap after")
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise MethodError(f"apply: {where} compiled already; apply first, compile after")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise MethodError("apply: the model is quantised; load it in full precision")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise MethodError(f"apply: {name} is sharded already; apply first, shard after")
    for name, module in model.named_modules():
        if is_quantised(module):
            raise MethodError(
                f"apply: {name or 'the model'} is a quantised layer ({type(module).__name__}); "
                "apply the method to a model loaded in full precision"
            )


def touched_roles(variant: Variant) -> tuple[str, ...]:
    return tuple(r for r in ROLES if r in variant.touches)


def refuse_parts(sites: list[Site], variant: Variant) -> None:
    for site in sites:
        where = site.name or type(site.module).__name__
        for role in touched_roles(variant):
            if role not in site.parts:
                raise MethodError(f"{where}: its {role} projection was not found; name it in pattern")
        if variant.tie and site.n_kv_heads != site.n_heads:
            raise MethodError(
                f"{where}: {site.n_kv_heads} key heads cannot use the matrix of {site.n_heads} query heads; leave tie off"
            )
        if variant.init == "slices":
            _refuse_slices(site, where)
        if isinstance(site.module, nn.MultiheadAttention) and type(site.module) is not nn.MultiheadAttention:
            raise MethodError(
                f"{where}: {type(site.module).__name__} changes torch's MultiheadAttention; cannot be split"
            )
        q, k = site.parts["q"].rows(), site.parts["k"].rows()
        if variant.tie and q is not None and k is not None and q.shape[-1] != k.shape[-1]:
            raise MethodError(f"{where}: q reads {q.shape[-1]} channels and k {k.shape[-1]}; they cannot be tied")


def _refuse_slices(site: Site, where: str) -> None:
    if isinstance(site.module, nn.MultiheadAttention):
        raise MethodError(
            f"{where}: torch's MultiheadAttention computes its projections inside one function, "
            "so a slice cannot take their place; use another init"
        )
    if site.family.name == "pattern":
        raise MethodError(
            f"{where}: whether q and k are plain products with the hidden state cannot be seen in a model outside the "
            'known families, so init = "slices" cannot take their place; use another init'
        )
    if not site.family.plain:
        raise MethodError(
            f"{where}: in {site.family.name} models q and k are not plain products with the hidden state, "
            'so init = "slices" cannot take their place; use another init'
        )
    for role in ("q", "k"):
        rows = site.parts[role].rows()
        assert rows is not None
        if rows.shape[-1] != site.n_heads * site.head_dim:
            raise MethodError(
                f"{where}: slices need a width of heads * head_dim = {site.n_heads * site.head_dim}, "
                f"and {role} reads {rows.shape[-1]} channels; use another init"
            )


def refuse_shared(model: nn.Module, sites: list[Site], ffn: Mapping[str, Site], variant: Variant) -> None:
    """A parameter that something else uses too must be neither drawn nor frozen.

    A whole attention module (or block) that stands in several places is one layer, as in ALBERT, and no harm.
    """
    ours = {name: site.block for name, site in ffn.items()}
    for site in sites:
        for role in touched_roles(variant):
            ours[site.parts[role].name] = site.name
            if variant.biases == "follow":
                ours[site.parts[role].bias_path] = site.name
    pairs = list(shared_names(model))
    for first, second in shared_modules(model):
        inside = [name for name, unit in ours.items() if not f"{unit}.".startswith(f"{first}.")]
        pairs += [(name, second + name[len(first) :]) for name in inside if name.startswith(f"{first}.")]
    for first, second in pairs:
        hit = next((name for name in (first, second) if name in ours), None)
        if hit is not None:
            other = second if hit == first else first
            raise MethodError(
                f"apply: {hit} is shared with {other}; untie them, or leave its layer out with variant.layers"
            )
