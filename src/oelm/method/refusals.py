"""What `apply` refuses before it changes anything, each in one line with the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from oelm.errors import MethodError
from oelm.method.families import is_quantised
from oelm.method.projections import Site
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


def shared_modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of paths by which two parents, or one parent twice, hold one module."""
    first: dict[int, str] = {}
    for path, module in model.named_modules():  # every parent once
        for leaf, child in module._modules.items():
            if child is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            if id(child) in first:
                yield first[id(child)], name
            else:
                first[id(child)] = name


def shared_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of names by which two different modules hold one parameter, or two that overlap in memory."""
    first: dict[int, str] = {}
    spans: list[tuple[int, int, int, str]] = []
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{leaf}" if path else leaf
            if id(parameter) in first:
                yield first[id(parameter)], name
                continue
            first[id(parameter)] = name
            # where there are no values (meta) or they are wrapped, only the parameter itself can be compared
            if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel():
                start = int(parameter.storage_offset()) * parameter.element_size()
                reach = (
                    sum(int(n - 1) * int(step) for n, step in zip(parameter.shape, parameter.stride(), strict=True)) + 1
                )
                place = parameter.untyped_storage().data_ptr()
                spans.append((place, start, start + reach * parameter.element_size(), name))
    widest = (0, 0, 0, "")
    for span in sorted(spans):
        if span[0] == widest[0] and span[1] < widest[2]:
            yield widest[3], span[3]
        if span[0] != widest[0] or span[2] > widest[2]:
            widest = span
