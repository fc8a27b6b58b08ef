"""`apply`: initialise, tie, freeze and prove, in place and all or nothing.

Owns the order of things (check, draw, split, write, freeze, record) and every refusal before the first change.
Refuses models that are converted, wrapped, compiled, quantised or on meta, and freezes that reach shared parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method import matrices
from oelm.method.projections import Part, Site, feed_forward, find_sites
from oelm.method.record import ATTRIBUTE, Entry, Record, digest, versions
from oelm.method.refusals import refuse_model, refuse_parts, refuse_shared, touched_roles
from oelm.method.report import Report, report_on
from oelm.method.split import ROLES, Slice, SplitMultiheadAttention, SplitProjection, exchange_keys
from oelm.method.variant import Variant, as_variant


Undo = list[Callable[[], object]]


def apply(
    model: nn.Module,
    variant: Variant | str | Mapping[str, Any],
    seed: int = 0,
    pattern: Mapping[str, Any] | None = None,
) -> Report:
    """Initialise, tie and freeze the model's projections as the variant says; in place, all or nothing.

    Call it after the weights are loaded and before compile, DDP, FSDP and the optimiser. The global random generator
    does not move. `pattern` names the projections of a model outside the known families.
    """
    chosen = as_variant(variant)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise MethodError(f"apply: seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    refuse_model(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise MethodError(f"apply: {name} is on the meta device, without values; load the weights first")
    record, undo = _transform(model, chosen, seed, pattern, values=True)
    with _undone_if_it_fails(undo):
        report = report_on(model, record)
    record.report = report.to_dict()
    return report


def convert(
    model: nn.Module, variant: Variant | str | Mapping[str, Any], pattern: Mapping[str, Any] | None = None
) -> Record:
    """The same change of structure and flags without values or hashes: for models on the meta device."""
    refuse_model(model)
    return _transform(model, as_variant(variant), 0, pattern, values=False)[0]


def fuse(model: nn.Module) -> nn.Module:
    """Put split projections back into the family's own fused modules, in place; for handing the model on.

    Freezing and the record end with it: a fused parameter trains if any of its parts did. `state_dict()` and
    `save_pretrained` of a converted model have the family's usual keys without this.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, SplitProjection):
                setattr(module, name, child.rebuild())
        if isinstance(module, SplitMultiheadAttention):
            module.rebuild()
    model.__dict__.pop(ATTRIBUTE, None)
    model.__dict__.pop("save_pretrained", None)
    return model


@dataclass(frozen=True)
class _Fill:
    """What one part will hold: its values and their digest as drawn."""

    values: Tensor | None
    drawn: str | None
    fresh: bool


def _transform(
    model: nn.Module, variant: Variant, seed: int, pattern: Mapping[str, Any] | None, *, values: bool
) -> tuple[Record, Undo]:
    from oelm.method.compact import record_when_saving  # it builds on this module

    sites = find_sites(model, pattern)
    treated = _treated(sites, variant)
    keys = {(site.stack, site.layer) for site in treated}
    ffn = _frozen_feed_forward(model, sites, keys, variant)
    refuse_parts(treated, variant)
    refuse_shared(model, treated, ffn, variant)
    fills = {
        (site.stack, site.layer, role): _fill(site, role, variant, seed)
        for site in treated
        for role in _drawn_roles(variant)
        if values
    }
    record = Record(
        variant=variant,
        seed=seed,
        model=type(model).__name__,
        families=tuple(dict.fromkeys(site.family.name for site in sites)),
        entries=(),
        versions=versions(),
        pattern=None if pattern is None else dict(pattern),
    )
    undo: Undo = []
    with torch.no_grad(), _undone_if_it_fails(undo):
        for site in treated:
            _split(model, site, undo)
        after = [s for s in find_sites(model, pattern) if (s.stack, s.layer) in keys] if treated else []
        entries: list[Entry] = []
        for site in after:
            entries += _treat(model, site, variant, fills, undo, values)
        for name, site in ffn.items():
            parameter = model.get_parameter(name)
            kind = "weight" if parameter.dim() >= 2 else "bias"
            if kind == "weight" or variant.biases == "follow":
                _freeze(parameter, undo)
                entries.append(_entry(name, "ffn", kind, site, parameter, True, None, values))
        record.entries = tuple(entries)
        setattr(model, ATTRIBUTE, record)
        undo.append(lambda: delattr(model, ATTRIBUTE))
        record_when_saving(model)
        undo.append(lambda: model.__dict__.pop("save_pretrained", None))
        if variant.addons:
            _attach(model, record, undo)
        if not any(p.requires_grad for p in model.parameters()):
            raise MethodError("apply: nothing would be left to train; check the variant and the model's requires_grad")
    return record, undo


@contextmanager
def _undone_if_it_fails(undo: Undo) -> Iterator[None]:
    """Ctrl-C too leaves the model as it was."""
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for step in reversed(undo):
                step()
        raise


def _attach(model: nn.Module, record: Record, undo: Undo) -> None:
    """Add-ons stand in every layer, treated or not: arms that differ in `layers` differ in nothing else."""
    from oelm.method import addons

    sites = [site for site in find_sites(model, record.pattern) if record.variant.cross or not site.cross]
    for module in {site.module for site in sites} | {model}:
        undo.append(_restorer(module))
    record.addons = tuple(addons.attach(model, sites, record.variant.addons))


def _restorer(module: nn.Module) -> Callable[[], None]:
    """Puts back the submodules of a module, and the hooks of everything in it, as they are now."""
    children, attributes = dict(module._modules), dict(module.__dict__)
    hooks = {m: (m._forward_hooks.copy(), m._forward_pre_hooks.copy()) for m in module.modules()}

    def restore() -> None:
        module._modules.clear()
        module._modules.update(children)
        for name, value in attributes.items():  # registering a submodule removes a plain attribute of its name
            module.__dict__.setdefault(name, value)
        for m, (after, before) in hooks.items():
            m._forward_hooks, m._forward_pre_hooks = after, before

    return restore


def _treated(sites: list[Site], variant: Variant) -> list[Site]:
    """The sites that the variant covers; none although it would touch something is an error."""
    if not variant.touches:
        return []
    counts: dict[str, int] = {}
    for site in sites:
        counts[site.stack] = max(counts.get(site.stack, 0), site.layer + 1)
    covered = {
        stack: set(variant.layer_numbers(count))
        for stack, count in counts.items()
        if variant.cross or not stack.endswith(".cross")
    }
    found = [site for site in sites if site.layer in covered.get(site.stack, ())]
    if not found:
        stacks = ", ".join(f"{stack} ({count} layers)" for stack, count in counts.items())
        raise MethodError(
            f"apply: the variant matches nothing: layers = {variant.layers!r}, cross = {variant.cross}; "
            f"choose layers of what the model has: {stacks}"
        )
    return found


def _drawn_roles(variant: Variant) -> tuple[str, ...]:
    """Roles whose values change; under `tie` K takes Q's and is not drawn."""
    if variant.init in ("keep", "slices"):
        return ()
    return tuple(r for r in ROLES if r in variant.roles and not (variant.tie and r == "k"))


def _frozen_feed_forward(
    model: nn.Module, sites: list[Site], keys: set[tuple[str, int]], variant: Variant
) -> dict[str, Site]:
    if "ffn" not in variant.frozen_roles:
        return {}
    found = {n: s for n, s in feed_forward(sites, model).items() if (s.stack, s.layer) in keys}
    if not found:
        raise MethodError("apply: no feed-forward was found beside the attention; leave ffn out of freeze")
    return found


def _fill(site: Site, role: str, variant: Variant, seed: int) -> _Fill:
    """The values of one part, drawn on the CPU in float64 and cast to the parameter's dtype."""
    part = site.parts[role]
    present = part.rows()
    assert present is not None
    shape = (site.heads(role), site.head_dim, present.shape[-1])
    fresh = variant.init != "orthogonalize"
    try:
        if fresh:
            found = matrices.draw(
                variant.init,
                *shape,
                seed=seed,
                stack=site.stack,
                layer=site.layer,
                role=role,
                scope=variant.scope,
                gain=variant.gain,
                std=variant.std,
            )
        else:
            present = present.detach().to("cpu", torch.float64).reshape(shape)
            found = matrices.orthonormal(np.ascontiguousarray(present.numpy()), variant.scope) * variant.gain
    except MethodError as error:
        raise MethodError(f"{part.name} ({role}): {error}") from None
    exact = torch.from_numpy(found).flatten(0, 1)
    single = exact.float()
    parameter = part.parameter
    assert parameter is not None
    cast = exact if parameter.dtype == torch.float64 else single.to(parameter.dtype)
    return _Fill(cast, digest(single) if fresh else None, fresh)


def _split(model: nn.Module, site: Site, undo: Undo) -> None:
    """Whole parameters for q, k and v where the family fuses them."""
    if isinstance(site.module, nn.MultiheadAttention):
        if not isinstance(site.module, SplitMultiheadAttention):
            undo.append(SplitMultiheadAttention.convert(site.module))
        return
    for part in site.parts.values():
        if part.layout is None or isinstance(_module(model, part.holder), SplitProjection):
            continue
        fused = _module(model, part.holder)
        split = SplitProjection(fused, part.layout, part.transposed)
        _replace(model, part.holder, split, undo)
        undo.append(split.empty_shell())


def _module(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path)


def _replace(model: nn.Module, path: str, new: nn.Module, undo: Undo) -> None:
    parent_path, _, leaf = path.rpartition(".")
    parent = _module(model, parent_path)
    old = getattr(parent, leaf)
    setattr(parent, leaf, new)
    undo.append(lambda: setattr(parent, leaf, old))


def _treat(
    model: nn.Module,
    site: Site,
    variant: Variant,
    fills: Mapping[tuple[str, int, str], _Fill],
    undo: Undo,
    values: bool,
) -> list[Entry]:
    """Write, tie and freeze one attention module; what was done to each parameter."""
    if variant.init == "slices":
        for role in ("q", "k"):
            _put_slice(model, site, role, variant.turn if role == "k" else 0, undo)
        return []
    entries: list[Entry] = []
    for role in touched_roles(variant):
        part = site.parts[role]
        frozen = role in variant.frozen_roles
        tied = variant.tie and role == "k"
        fill = fills.get((site.stack, site.layer, "q" if tied else role))
        source = site.parts["q"] if tied else part
        if tied:
            _tie(part, source, undo)
        elif fill is not None and fill.values is not None:
            rows = part.rows()
            assert rows is not None
            _write(rows, fill.values, undo)
        weight = part.parameter
        assert isinstance(weight, nn.Parameter)
        if frozen:
            _freeze(weight, undo)
        redrawn = role in variant.roles and variant.init in ("orthogonal", "gaussian")
        drawn = fill.drawn if fill is not None else None
        entries.append(_entry(part.name, role, "weight", site, weight, frozen, drawn, values, tied=tied))
        bias = part.bias
        if isinstance(bias, nn.Parameter) and variant.biases == "follow":
            if redrawn and values:
                _write(bias, torch.zeros_like(bias), undo)
            if frozen:
                _freeze(bias, undo)
            if frozen or redrawn:
                entries.append(_entry(part.bias_path, role, "bias", site, bias, frozen, None, values, zeros=redrawn))
    return entries


def _write(target: Tensor, new: Tensor, undo: Undo) -> None:
    target = target.detach()
    before = target.clone()
    undo.append(lambda: target.copy_(before))
    target.copy_(new)


def _freeze(parameter: Tensor, undo: Undo) -> None:
    trained, grad = parameter.requires_grad, parameter.grad
    undo.append(lambda: _thaw(parameter, trained, grad))
    parameter.requires_grad_(False)
    parameter.grad = None


def _thaw(parameter: Tensor, trained: bool, grad: Tensor | None) -> None:
    parameter.requires_grad_(trained)
    parameter.grad = grad


def _tie(part: Part, source: Part, undo: Undo) -> None:
    """K's module holds Q's Parameter itself, so that they stay one when they train."""
    module, old = part.module, part.parameter
    name = part.weight_name
    setattr(module, name, source.parameter)
    undo.append(lambda: setattr(module, name, old))
    if not isinstance(module, nn.MultiheadAttention):
        undo += [handle.remove for handle in exchange_keys(module, _own_copy)]


def _own_copy(module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    """Files hold no tied projections: the plain library reads K from a key of its own."""
    key = prefix + "weight"
    if key in state:
        state[key] = state[key].detach().clone()


def _put_slice(model: nn.Module, site: Site, role: str, turn: int, undo: Undo) -> None:
    part = site.parts[role]
    weight = part.parameter
    assert weight is not None
    heads = site.heads(role)
    new = Slice(heads, site.head_dim, site.n_heads // heads, weight, part.bias is not None, part.transposed, turn)
    _replace(model, part.holder, new, undo)


def _entry(
    name: str,
    role: str,
    kind: str,
    site: Site,
    parameter: Tensor,
    frozen: bool,
    drawn: str | None,
    values: bool,
    *,
    tied: bool = False,
    zeros: bool = False,
) -> Entry:
    return Entry(
        name=name,
        role=role,
        kind=kind,
        stack=site.stack,
        layer=site.layer,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        frozen=frozen,
        drawn=drawn,
        present=digest(parameter) if values else None,
        tied=tied,
        zeros=zeros,
    )
