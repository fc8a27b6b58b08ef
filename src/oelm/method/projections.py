"""Finds the Q, K, V, O projections of any model, by the table of families or by a pattern for a model outside it.

Owns where each matrix lies, how many heads it has, and how stacks and layers are counted. Refuses to change a model, and to guess:
a module whose shapes do not fit the row that matched is an error, not a near miss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.families import (
    CROSS,
    FAMILIES,
    FEED_FORWARD,
    HEAD_DIMS,
    HEADS,
    SCALES,
    Family,
    guess_heads,
    is_matrix,
    is_quantised,
    is_transposed,
    nothing_found,
    pattern_family,
    whole,
)
from oelm.method.split import ROLES, Layout, Slice, SplitMultiheadAttention, SplitProjection


@dataclass(frozen=True)
class Part:
    """Where one role's matrix lies: the module that holds it, its parameters' leaf names, its place when fused."""

    role: str
    holder: str
    module: nn.Module
    weight_name: str = "weight"
    bias_name: str = "bias"
    transposed: bool = False
    layout: Layout | None = None  # set while fused with other roles

    @property
    def name(self) -> str:
        return f"{self.holder}.{self.weight_name}" if self.holder else self.weight_name

    @property
    def bias_path(self) -> str:
        return f"{self.holder}.{self.bias_name}" if self.holder else self.bias_name

    @property
    def parameter(self) -> Tensor | None:
        """The whole parameter; None where a slice took its place."""
        found = None if isinstance(self.module, Slice) else getattr(self.module, self.weight_name)
        return found if isinstance(found, Tensor) else None

    @property
    def bias(self) -> Tensor | None:
        return None if isinstance(self.module, Slice) else getattr(self.module, self.bias_name, None)

    def rows(self) -> Tensor | None:
        """The matrix of this role as (out, in) rows, or its (heads, head_dim, in) part while fused."""
        weight = self.parameter
        if weight is None:
            return None
        if self.transposed:
            weight = weight.t()
        return weight if self.layout is None else self.layout.take(weight, self.role)


@dataclass(frozen=True)
class Site:
    """One attention module: where it stands, how many heads it has, where its matrices are."""

    family: Family
    stack: str
    layer: int
    cross: bool
    name: str
    module: nn.Module
    block: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    parts: Mapping[str, Part] = field(default_factory=dict)

    def heads(self, role: str) -> int:
        return self.n_heads if role == "q" else self.n_kv_heads

    @property
    def scale(self) -> float:
        """What the family multiplies q·k with."""
        if not self.family.scaled:
            return 1.0
        for name in SCALES:
            value = getattr(self.module, name, None)
            if isinstance(value, float):
                return value
        position_terms = getattr(self.module, "pos_att_type", None) or ()  # DeBERTa adds them before it divides
        return 1.0 / math.sqrt(self.head_dim * (1 + len(position_terms)))


@dataclass(frozen=True)
class Projection:
    """One of q, k, v, o of one attention module.

    `weight` is the live tensor seen as (n_heads, head_dim, width_in) for q, k, v, and as (out, in) for o: a view of
    the parameter `name` where its layout allows one (grouped fusions with several query heads are copied).
    """

    stack: str
    layer: int
    role: str
    name: str
    n_heads: int
    head_dim: int
    weight: Tensor = field(repr=False, compare=False)


def find_projections(model: nn.Module, pattern: Mapping[str, Any] | None = None) -> list[Projection]:
    """Every projection of the model, in order; cross-attention's stacks end in `.cross`."""
    found = []
    for site in find_sites(model, pattern):
        for role, part in site.parts.items():
            rows = part.rows()
            if rows is None:
                continue
            if role != "o":
                rows = rows.reshape(site.heads(role), site.head_dim, -1)
            heads = site.n_heads if role == "o" else site.heads(role)
            found.append(Projection(site.stack, site.layer, role, part.name, heads, site.head_dim, rows))
    return found


def find_sites(model: nn.Module, pattern: Mapping[str, Any] | None = None) -> list[Site]:
    """Every attention module of the model, in order. None at all is an error that names the nearest modules."""
    if not isinstance(model, nn.Module):
        raise MethodError(f"expected a torch.nn.Module, got {type(model).__name__}")
    own = None if pattern is None else pattern_family(pattern)
    rows = FAMILIES if own is None else (own,)
    heads = None if pattern is None else pattern.get("heads")
    modules = dict(model.named_modules(remove_duplicate=False))  # a shared child is a child of each of its parents
    found = []
    seen: set[int] = set()
    for name in modules:
        for family in rows:
            parts = _parts(family, name, modules)
            if parts is not None:
                if own is not None:  # the names may be long: the attention module is where q stands
                    name = parts["q"].rpartition(".")[0]
                if id(modules[name]) not in seen:  # shared whole, as in ALBERT, it is one layer
                    seen.add(id(modules[name]))
                    found.append((family, name, modules[name], parts))
                break
    if not found:
        raise MethodError(nothing_found(model, modules, pattern))
    return _numbered([_site(modules, model, heads, *each) for each in found])


def _join(prefix: str, path: str) -> str:
    parts = prefix.split(".") if prefix else []
    while path.startswith("../"):
        if not parts:
            return "?"
        parts, path = parts[:-1], path[3:]
    return ".".join([*parts, path])


def _parts(family: Family, name: str, modules: Mapping[str, nn.Module]) -> dict[str, str] | None:
    """role -> module path, when every child that the row needs is there."""
    module = modules[name]
    if not re.fullmatch(family.owner, type(module).__name__):
        return None
    if family.layout == "in_proj":
        return {"o": _join(name, family.o)} if isinstance(module, nn.MultiheadAttention) else None
    paths = {role: _join(name, family.path(role)) for role in ("q", "k", "v", "o") if family.path(role)}
    needed = {"q", "k"} if family.name == "pattern" else set(paths)
    if not {"q", "k"} <= set(paths) or not all(paths[role] in modules for role in needed):
        return None
    return {role: path for role, path in paths.items() if path in modules}


def _site(
    modules: Mapping[str, nn.Module],
    model: nn.Module,
    given_heads: int | None,
    family: Family,
    name: str,
    module: nn.Module,
    paths: Mapping[str, str],
) -> Site:
    where = f"{name or type(module).__name__} ({family.name})"
    for role in ("q", "k", "v", "o"):
        child = modules.get(paths.get(role, ""), None)
        if role in paths and child is not None and not isinstance(child, SplitProjection | Slice):
            _require_matrix(child, paths[role])
    if isinstance(module, nn.MultiheadAttention):
        n_heads, head_dim, n_kv = module.num_heads, module.head_dim, module.num_heads
        parts = _torch_parts(name, module)
    else:
        n_heads, head_dim = _heads(modules, model, given_heads, family, name, paths, where)
        n_kv, parts = _split_parts(modules, family, paths, n_heads, head_dim, where)
    if "o" in paths:
        output = modules[paths["o"]]
        parts["o"] = Part("o", paths["o"], output, transposed=is_transposed(output))
    cross = _is_cross(name, modules)
    return Site(family, "", 0, cross, name, module, "", n_heads, n_kv, head_dim, parts)


def _is_cross(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """By what the module or the one around it is called; torch's decoder layer calls its own `multihead_attn`."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "multihead_attn":
        return isinstance(modules[parent], nn.TransformerDecoderLayer)
    near = ".".join(name.split(".")[-2:])
    return bool(CROSS.search(near)) or getattr(modules[name], "is_cross_attention", None) is True


def _require_matrix(module: nn.Module, path: str) -> None:
    kind = type(module).__name__
    if hasattr(module, "base_layer"):
        raise MethodError(f"{path} is a {kind} around another layer; merge or unload the adapter first")
    if hasattr(module, "parametrizations"):
        raise MethodError(
            f"{path}: its weight is computed by a parametrization; "
            "make it plain first with torch.nn.utils.parametrize.remove_parametrizations"
        )
    if is_quantised(module):
        raise MethodError(f"{path} is a quantised layer ({kind}); apply the method to a model loaded in full precision")
    if not is_matrix(module):
        raise MethodError(
            f"{path} is a {kind}, not a Linear with a two-dimensional weight, so it cannot be drawn or frozen; "
            "exchange it for a Linear, or name the Linears within with pattern"
        )


def _out_features(module: nn.Module) -> int:
    if isinstance(module, SplitProjection | Slice):
        return module.out_features
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[1] if is_transposed(module) else weight.shape[0])


def _in_features(module: nn.Module) -> int:
    if isinstance(module, SplitProjection | Slice):
        return module.in_features
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0] if is_transposed(module) else weight.shape[1])


def _heads(
    modules: Mapping[str, nn.Module],
    model: nn.Module,
    given: int | None,
    family: Family,
    name: str,
    paths: Mapping[str, str],
    where: str,
) -> tuple[int, int]:
    """(query heads, head_dim): from the module itself, its settings, the modules around it, the model's settings."""
    module = modules[name]
    around = [module, getattr(module, "config", None)]
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        around.append(modules[parent])
    around += [getattr(model, "config", None), getattr(model, "shape", None)]
    heads = given if given is not None else next((n for o in around if (n := whole(o, HEADS))), None)
    head_dim = whole(module, HEAD_DIMS)
    fused = "q" in family.roles
    query = modules[paths["q"]]
    total = _in_features(modules[paths["o"]]) if fused and "o" in paths else _out_features(query)
    if fused and "o" not in paths:
        total = _in_features(query)
    if heads is None and head_dim is None:
        likely, seen = guess_heads(modules, paths["q"], fused=fused)
        raise MethodError(
            f"{where}: how many heads it has cannot be seen (looked for {', '.join(HEADS)}); say it with "
            f'pattern={{"heads": {likely}}}{"" if seen else f" ({likely} is a guess)"}'
        )
    if given is not None or head_dim is None:
        assert heads is not None
        head_dim = total // heads
    if heads is None:
        heads = total // head_dim
    if head_dim * heads != total:
        raise MethodError(
            f"{where}: {heads} heads of {head_dim} channels do not make the projection's {total}; "
            "it holds something else beside the heads, and cannot be treated"
        )
    return heads, head_dim


def _split_parts(
    modules: Mapping[str, nn.Module],
    family: Family,
    paths: Mapping[str, str],
    n_heads: int,
    head_dim: int,
    where: str,
) -> tuple[int, dict[str, Part]]:
    parts: dict[str, Part] = {}
    if family.roles:
        holder = paths[family.roles[-1]]
        fused = modules[holder]
        own = n_heads if "q" in family.roles else 0
        units, rest = divmod(_out_features(fused), head_dim)
        n_kv = (units - own) // 2
        if rest or n_kv < 1 or (units - own) % 2:
            raise MethodError(
                f"{where}: {_out_features(fused)} fused channels are not {n_heads} query heads of {head_dim} and "
                "equally many key and value heads"
            )
        layout = Layout(family.layout, {r: n_heads if r == "q" else n_kv for r in family.roles}, head_dim)
        for role in family.roles:
            if isinstance(fused, SplitProjection):
                parts[role] = Part(role, f"{holder}.{role}", getattr(fused, role))
            else:
                parts[role] = Part(role, holder, fused, transposed=is_transposed(fused), layout=layout)
    else:
        n_kv = _out_features(modules[paths["k"]]) // head_dim
        if n_kv * head_dim != _out_features(modules[paths["k"]]):
            raise MethodError(f"{where}: the keys' projection is not a whole number of heads of {head_dim} channels")
    for role in ("q", "k", "v"):
        if role in paths and role not in family.roles:
            child = modules[paths[role]]
            parts[role] = Part(role, paths[role], child, transposed=is_transposed(child))
    if n_kv == 0 or n_heads % n_kv:
        raise MethodError(f"{where}: {n_kv} key heads do not divide {n_heads} query heads")
    return n_kv, {role: parts[role] for role in ("q", "k", "v") if role in parts}


def _torch_parts(name: str, module: nn.MultiheadAttention) -> dict[str, Part]:
    if module.bias_k is not None:
        raise MethodError(f"{name or 'MultiheadAttention'}: bias_k and bias_v are extra keys; not supported")
    if isinstance(module, SplitMultiheadAttention):
        return {r: Part(r, name, module, f"{r}_proj_weight", f"{r}_proj_bias") for r in ROLES}
    if getattr(module, "in_proj_weight", None) is None:
        return {r: Part(r, name, module, f"{r}_proj_weight", "in_proj_bias") for r in ROLES}
    layout = Layout("concat", dict.fromkeys(ROLES, module.num_heads), module.head_dim)
    return {r: Part(r, name, module, "in_proj_weight", "in_proj_bias", layout=layout) for r in ROLES}


def _blocks(sites: list[Site]) -> list[str]:
    """For every site the path of the repeated block around it: up to the last number that differs between layers.

    In `3.0.attn` of nested lists the blocks are numbered by the 3; where nothing differs, by the last number.
    """
    values: dict[tuple[str, int], set[str]] = {}
    names = [site.name.split(".") for site in sites]
    for parts in names:
        for i, part in enumerate(parts):
            if part.isdigit():
                values.setdefault((_template(parts), i), set()).add(part)
    found = []
    for site, parts in zip(sites, names, strict=True):
        numbered = [i for i, part in enumerate(parts) if part.isdigit()]
        if site.family.nested and len(numbered) > 1:
            numbered.pop()
        differing = [i for i in numbered if len(values[_template(parts), i]) > 1]
        last = (differing or numbered or [len(parts) - 2])[-1]
        found.append(".".join(parts[: last + 1]))
    return found


def _template(parts: list[str]) -> str:
    return ".".join("*" if part.isdigit() else part for part in parts)


def _numbered(sites: list[Site]) -> list[Site]:
    """Give every site its block, its stack's label and its number within the stack."""
    blocks = _blocks(sites)
    prefixes = sorted({block.rpartition(".")[0] for block in blocks})
    short = {prefix: _label(prefix) for prefix in prefixes}
    if len(set(short.values())) < len(prefixes):
        short = {prefix: prefix or "main" for prefix in prefixes}
    found = []
    count: dict[str, int] = {}
    for site, block in zip(sites, blocks, strict=True):
        stack = short[block.rpartition(".")[0]] + (".cross" if site.cross else "")
        layer = count.get(stack, 0)
        count[stack] = layer + 1
        found.append(replace(site, block=block, stack=stack, layer=layer))
    return found


def _label(prefix: str) -> str:
    """encoder or decoder where the path says so: the same whether or not a head stands on top of the model."""
    return next((part for part in reversed(prefix.split(".")) if part in ("encoder", "decoder")), "main")


def feed_forward(sites: list[Site], model: nn.Module) -> dict[str, Site]:
    """Names of the feed-forward's parameters, each with the site of its block."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, Site] = {}
    for site in sites:
        if site.cross:
            continue
        for path in (_join(around, path) for around in _around(site) for path in FEED_FORWARD):
            if path not in modules:
                continue
            for name, module in modules[path].named_modules(prefix=path):
                own = dict(module.named_parameters(recurse=False))
                if any(parameter.dim() >= 2 for parameter in own.values()):
                    found.update({f"{name}.{leaf}": site for leaf in own})
    return found


def _around(site: Site) -> list[str]:
    """The block, and list items inside it on the way to the attention: ALBERT's groups hold blocks of their own."""
    names = site.name.split(".")
    start = len(site.block.split(".")) if site.block else 0
    return [site.block] + [".".join(names[: i + 1]) for i in range(start, len(names)) if names[i].isdigit()]
