"""Add-ons on Hugging Face models: hooks on the outputs of the query's and key's projections.

Owns what shifted keys must know beside the keys: where documents and sequences start, and the last key of a cache.
Refuses at the first pass in which a key's predecessor cannot be known, rather than mixing in a wrong one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.addons import Addons
from oelm.method.projections import Site
from oelm.method.split import Layout


INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features")
HIDDEN = -1e3  # what an additive mask is below where nothing may be seen; people write -1e4, -1e9, the dtype's least
NORMS = {"q": ("q_norm", "q_layernorm", "query_layernorm"), "k": ("k_norm", "k_layernorm", "key_layernorm")}


class Reading:
    """What one stack's forward pass says of its tokens, for all its layers."""

    def __init__(self, stack: nn.Module) -> None:
        self.names = tuple(inspect.signature(stack.forward).parameters)
        self.first: Tensor | None = None
        self.pending: list[Tensor | None] = []  # of passes whose backward has not begun
        self.replayed = False

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the stack's forward: find the positions that have no predecessor."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        self.first = _starts(given)
        if torch.is_grad_enabled() and getattr(module, "gradient_checkpointing", False):
            if self.replayed:
                self.pending, self.replayed = [], False
            self.pending.append(self.first)

    def current(self) -> Tensor | None:
        """The starts of the pass that a layer is in; gradient checkpointing runs layers again in the backward."""
        if not self.pending or torch._C._current_graph_task_id() == -1:
            return self.first
        self.replayed = True
        one = self.pending[0]
        for other in self.pending[1:]:
            same = one is other or (one is not None and other is not None and torch.equal(one, other))
            if not same:
                raise MethodError(
                    "shift-keys: gradient checkpointing with several differently padded passes before one backward "
                    "cannot be right; run backward after each pass, or turn gradient checkpointing off"
                )
        return one


def _starts(given: Mapping[str, Any]) -> Tensor | None:
    """Bool (B, T), true where a token has no predecessor; None when only the first position has none."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    tokens = next((given[name] for name in INPUTS[:2] if given.get(name) is not None), None)
    if tokens is None:
        return None  # images and sound are whole: nothing is padded
    cache = given.get("past_key_values")
    past = int(cache.get_seq_length()) if cache is not None else 0
    batch, length = tokens.shape[:2]
    starts: list[Tensor] = []
    if mask is not None:
        starts.append(~_follows(mask, past, length).expand(batch, length))
    if isinstance(positions, Tensor) and length > 1:
        if positions.dim() != 2:
            raise MethodError("shift-keys: position_ids of more than two dimensions do not say what a key follows")
        jumps = positions[:, 1:] != positions[:, :-1] + 1
        starts.append(torch.cat((torch.zeros_like(jumps[:, :1]) | (past == 0), jumps), 1).expand(batch, length))
    bounds = given.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor):
        steps = torch.arange(length, device=tokens.device)
        starts.append(torch.isin(steps, bounds)[None].expand(batch, length))
    if not starts:
        return None
    found = starts[0]
    for other in starts[1:]:
        found = found | other
    return found


def _follows(mask: Any, past: int, length: int) -> Tensor:
    """Bool (B or 1, T), true where a token's predecessor is one that it may look at."""
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else ()
    if len(shape) == 2 and shape[1] == past + length:
        valid = mask.to(torch.bool)
        return valid[:, past - 1 : -1] if past else nn.functional.pad(valid[:, :-1], (1, 0))
    if len(shape) == 4 and shape[1] == 1 and shape[2:] == (length, past + length):
        seen = mask if mask.dtype == torch.bool else mask > HIDDEN
        before = seen[:, 0].diagonal(past - 1, dim1=-2, dim2=-1)
        return before if past else nn.functional.pad(before, (1, 0))
    raise MethodError(
        "shift-keys: needs an attention_mask of shape (batch, tokens), or (batch, 1, tokens, tokens), that also covers "
        f"the cache; {shape or type(mask).__name__} does not say which token a key follows"
    )


class HookedAddons(Addons):
    """Addons that act through hooks on one attention module of a Hugging Face model."""

    def __init__(self, site: Site, kinds: Iterable[str], reading: Reading | None, **kind: Any) -> None:
        super().__init__(site.n_heads, site.n_kv_heads, site.head_dim, kinds, **kind)
        self.sizes = {"q": site.n_heads, "k": site.n_kv_heads}
        index = getattr(site.module, "layer_idx", None)
        self.layer_index = index if isinstance(index, int) else site.layer
        layout = site.parts["q"].layout
        self.spans = {role: _span(layout, role) for role in ("q", "k")} if layout is not None else {}
        self.groups = layout.groups if layout is not None else 1
        self.reading = reading
        self.inside = False  # of the attention's forward: a norm of heads may be called by others too
        self.cache: Any = None
        self.last: Tensor | None = None

    def hook(self, site: Site) -> None:
        """Register on the attention module and on what gives its queries and keys."""
        site.module.register_forward_pre_hook(self.before, with_kwargs=True)
        targets = {"q": _target(site, "q"), "k": _target(site, "k")}
        if set(self.kinds) - {"shift-keys"}:
            targets["q"].register_forward_hook(self.on_query)
        if self.shift is not None:
            targets["k"].register_forward_hook(self.on_key)
        site.module.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def on_query(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self._on("q", self.query, args, output) if self.inside else output

    def on_key(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self._on("k", self._mixed, args, output) if self.inside else output

    def _on(self, role: str, act: Callable[[Tensor], Tensor], args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Act on (B, T, heads, head_dim), whatever shape the family has it in."""
        heads = self.sizes[role]
        if output.dim() == 4:  # from a norm of heads
            if _heads_first(args[0], output, heads):
                return act(output.transpose(1, 2)).transpose(1, 2)
            return act(output)
        if output.dim() != 3:
            raise MethodError("add-ons: tokens without a batch dimension (unpadded) do not say what a key follows")
        if output.shape[-1] == heads * self.head_dim:
            return act(torch.unflatten(output, -1, (heads, self.head_dim))).flatten(-2)
        start, end = self.spans[role]  # still fused with the other roles
        units = torch.unflatten(output, -1, (self.groups, -1, self.head_dim))
        own = torch.unflatten(act(units[..., start:end, :].flatten(-3, -2)), -2, (self.groups, end - start))
        return torch.cat((units[..., :start, :], own, units[..., end:, :]), dim=-2).flatten(-3)

    def _mixed(self, keys: Tensor) -> Tensor:
        assert self.reading is not None
        previous = self._previous(keys)
        if self.cache is not None:
            self.last = keys[:, -1:]
        return self.key(keys, first=self.reading.current(), previous=previous)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the attention: remember its cache."""
        self.inside = True
        if self.shift is None:
            return
        cache = next((value for value in (*kwargs.values(), *args) if _is_cache(value)), None)
        self.cache = getattr(cache, "self_attention_cache", cache)
        self.last = None
        if self.cache is not None and getattr(self.cache, "is_compileable", False):
            raise MethodError(
                f"shift-keys: a {type(self.cache).__name__} has no place for the last key; use the default dynamic cache"
            )

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After the attention: keep the last key beside the layer's cache."""
        self.inside = False
        if self.cache is not None and self.last is not None and not module.training:
            layer = self.cache.layers[self.layer_index]
            if not getattr(layer, "remembers_key", False):
                kind: Any = type(layer)
                layer.__class__ = _remembering(kind)
            layer.last_key, layer.last_seen = self.last, int(layer.get_seq_length())
        self.cache = self.last = None

    def _previous(self, keys: Tensor) -> Tensor | None:
        """The key before these, from the layer's cache; None at the start."""
        if self.cache is None or len(self.cache.layers) <= self.layer_index:
            return None
        layer = self.cache.layers[self.layer_index]
        seen = int(layer.get_seq_length())
        if seen == 0:
            return None
        last = getattr(layer, "last_key", None)
        if last is None or layer.last_seen != seen or last.shape[0] != keys.shape[0]:
            raise MethodError(
                "shift-keys: the cache was cut, changed or filled elsewhere (or in training mode), so the key before "
                "this token is unknown; start from an empty cache with model.eval()"
            )
        return last  # type: ignore[no-any-return]


@functools.cache
def _remembering(kind: Any) -> Any:
    """The class of a cache's layer, with a last key that goes where the layer's batch goes.

    Made with one base, so that a layer's class can be exchanged; a key kept anywhere else would miss a beam's reorder.
    """

    class Remembering(kind):  # type: ignore[misc]
        remembers_key = True
        _layer_type = None  # or transformers would make every new cache of this type from this class
        last_key: Tensor | None
        last_seen: int

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            if self.last_key is not None:
                self.last_key = self.last_key.index_select(0, beam_idx.to(self.last_key.device))

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            if self.last_key is not None:
                self.last_key = self.last_key.repeat_interleave(repeats, dim=0)

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            if self.last_key is not None:
                self.last_key = self.last_key[indices]

        def crop(self, *args: Any, **kwargs: Any) -> None:
            super().crop(*args, **kwargs)
            self.last_key = None

        def reset(self) -> None:
            super().reset()
            self.last_key = None

    if hasattr(kind, "_layer_type"):
        Remembering._layer_type = kind._layer_type
    Remembering.__name__ = Remembering.__qualname__ = kind.__name__
    return Remembering


def _span(layout: Layout, role: str) -> tuple[int, int]:
    """Where a role's heads stand within a group of a fused output."""
    start = 0
    for name, count in layout.per_group.items():
        if name == role:
            return start, start + count
        start += count
    raise KeyError(role)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _heads_first(before: Tensor, after: Tensor, heads: int) -> bool:
    """Whether a norm of heads works on (B, heads, T, head_dim): by shape, or by strides when T equals heads."""
    if after.shape[1] == after.shape[2]:
        return before.stride(1) < before.stride(2)
    return after.shape[1] == heads


def _target(site: Site, role: str) -> nn.Module:
    """What gives the query or key before rotation: a norm of its heads where there is one, else the projection."""
    for name in NORMS[role]:
        norm = getattr(site.module, name, None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            return norm
    return site.parts[role].module


def stack_of(model: nn.Module, site: Site) -> nn.Module | None:
    """The innermost Hugging Face model around an attention module: the one that is given tokens and their mask."""
    modules = dict(model.named_modules())
    path = site.name
    while path:
        path = path.rpartition(".")[0]
        module: nn.Module = modules[path]
        if hasattr(module, "main_input_name") and hasattr(module, "config"):
            names = inspect.signature(module.forward).parameters
            if any(name in names for name in INPUTS):
                return module
    return None
