"""Modules that take a projection's place: a fused one split into whole parameters, and heads that read slices.

Each keeps the family's usual keys in `state_dict()` and reads them in `load_state_dict()`, so that a checkpoint
loads in the plain library. Owns the layouts of fused projections. Refuses to decide what is split or frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


ROLES = ("q", "k", "v")


class Layout:
    """Where q, k and v lie along the output of a fused projection.

    concat: all of q, then all of k, then all of v. groups: for every key/value head its query heads, then itself, then
    its value head; with one query head a group this is the interleaving of GPT-NeoX and BLOOM.
    """

    def __init__(self, kind: str, heads: Mapping[str, int], head_dim: int) -> None:
        self.kind, self.heads, self.head_dim = kind, dict(heads), head_dim
        self.groups = self.heads["k"] if kind == "groups" else 1
        self.per_group = {role: n // self.groups for role, n in self.heads.items()}
        self.rows = sum(self.heads.values()) * head_dim

    def take(self, fused: Tensor, role: str) -> Tensor:
        """The part of one role along the first dimension as (heads, head_dim, ...): a view where strides allow."""
        start = 0
        for name, n in self.per_group.items():
            if name == role:
                grouped = fused.view(self.groups, -1, self.head_dim, *fused.shape[1:])
                return grouped[:, start : start + n].flatten(0, 1)
            start += n
        raise KeyError(role)

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The fused tensor whose parts along the first dimension are given, each (heads * head_dim, ...)."""
        pieces = [
            parts[role].reshape(self.groups, n * self.head_dim, *parts[role].shape[1:])
            for role, n in self.per_group.items()
        ]
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def join_outputs(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The fused output whose parts along the last dimension are given."""
        if self.groups == 1:
            return torch.cat([parts[role] for role in self.heads], dim=-1)
        pieces = [
            parts[role].reshape(*parts[role].shape[:-1], self.groups, n * self.head_dim)
            for role, n in self.per_group.items()
        ]
        return torch.cat(pieces, dim=-1).flatten(-2)


def exchange_keys(
    module: nn.Module, write: Callable[..., None] | None, read: Callable[..., None] | None = None
) -> list[RemovableHandle]:
    """Let `write` change what `state_dict()` gives of this module, and `read` what `load_state_dict()` hands to it."""
    handles = []
    if write is not None:
        handles.append(module.register_state_dict_post_hook(write))  # type: ignore[no-untyped-call]
    if read is not None:
        handles.append(module.register_load_state_dict_pre_hook(read))  # type: ignore[no-untyped-call]
    return handles


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """A Linear around given parameters; built on meta so that no random number is drawn."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear


def _own(value: Tensor, trains: bool) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format), requires_grad=trains)


class SplitProjection(nn.Module):
    """One fused projection as Linears `q`, `k`, `v` whose outputs are laid out as the fused one's were."""

    def __init__(self, fused: nn.Module, layout: Layout, transposed: bool) -> None:
        super().__init__()
        self.layout, self.transposed = layout, transposed
        weight, bias = fused.weight, fused.bias
        assert isinstance(weight, nn.Parameter)
        rows = weight.t() if transposed else weight
        for role in layout.heads:
            part = _own(layout.take(rows, role).flatten(0, 1), weight.requires_grad)
            part_bias = None
            if isinstance(bias, nn.Parameter):
                part_bias = _own(layout.take(bias, role).flatten(), bias.requires_grad)
            setattr(self, role, _linear(part, part_bias))
        self.in_features, self.out_features = int(rows.shape[1]), int(rows.shape[0])
        self.training = fused.training
        self.__dict__["shell"] = fused  # not a submodule: only its kind is needed, to fuse again
        exchange_keys(self, _fuse_keys, _split_keys)

    def forward(self, x: Tensor) -> Tensor:
        return self.layout.join_outputs({role: getattr(self, role)(x) for role in self.layout.heads})

    def fused(self, name: str) -> Tensor | None:
        """The fused `weight` or `bias`, computed."""
        parts = {role: getattr(getattr(self, role), name) for role in self.layout.heads}
        if any(part is None for part in parts.values()):
            present = [part for part in parts.values() if part is not None]
            if not present:
                return None
            parts = {
                role: present[0].new_zeros(self.layout.heads[role] * self.layout.head_dim) if part is None else part
                for role, part in parts.items()
            }
        joined = self.layout.join(parts)
        return joined.t() if self.transposed and name == "weight" else joined

    def empty_shell(self) -> Callable[[], None]:
        """Let the fused module's own tensors go; the result puts them back."""
        shell: nn.Module = self.__dict__["shell"]
        kept = dict(shell._parameters)
        for name in kept:
            shell._parameters[name] = None
        return lambda: shell._parameters.update(kept)

    def rebuild(self) -> nn.Module:
        """The fused module again, with the present values."""
        shell: nn.Module = self.__dict__["shell"]
        trains = any(p.requires_grad for p in self.parameters())
        for name in ("weight", "bias"):
            joined = self.fused(name)
            shell._parameters[name] = None if joined is None else _own(joined, trains)
        shell.training = self.training
        return shell

    @property
    def weight(self) -> Tensor:
        weight = self.fused("weight")
        assert weight is not None
        return weight

    @property
    def bias(self) -> Tensor | None:
        return self.fused("bias")


def _fuse_keys(module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    assert isinstance(module, SplitProjection)
    layout = module.layout
    for name in ("weight", "bias"):
        parts = {role: state.pop(f"{prefix}{role}.{name}", None) for role in layout.heads}
        present = [part for part in parts.values() if part is not None]
        if present:
            whole = {
                role: present[0].new_zeros(layout.heads[role] * layout.head_dim) if part is None else part
                for role, part in parts.items()
            }
            joined = layout.join(whole)
            if module.transposed and name == "weight":
                joined = joined.t().contiguous()
            state[prefix + name] = joined


def _split_keys(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    assert isinstance(module, SplitProjection)
    for name in ("weight", "bias"):
        fused = state.get(prefix + name)
        if fused is None or (name == "weight" and fused.dim() != 2):
            continue
        if name == "weight" and module.transposed:
            fused = fused.t()
        if fused.shape[0] != module.layout.rows:
            continue  # left in place: loading then says that the key does not fit
        del state[prefix + name]
        for role in module.layout.heads:
            state[f"{prefix}{role}.{name}"] = module.layout.take(fused, role).flatten(0, 1).contiguous()


class SplitMultiheadAttention(nn.MultiheadAttention):
    """torch's attention with whole parameters for q, k and v, made from one in place.

    Where gradients flow it takes the path for separate projections that torch itself has, so a frozen one costs none.
    Where none do, torch's fused inference kernels (of this module, of nn.TransformerEncoderLayer, and the nested
    tensors of nn.TransformerEncoder) may read the stacked matrix, which is then made from the parts.
    """

    _was_fused: bool

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return self._stacked("weight") if self._was_fused else None

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        return self._stacked("bias")

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """What torch asks to choose between one stacked matrix and three."""
        if not self._was_fused:
            return False
        return not (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()))

    def _stacked(self, name: str) -> Tensor | None:
        parts = [self._parameters.get(f"{role}_proj_{name}") for role in ROLES]
        found = [part for part in parts if part is not None]
        return torch.cat([*found]) if found else None

    @classmethod
    def convert(cls, module: nn.MultiheadAttention) -> Callable[[], None]:
        """Make `module` one of this class; the result undoes it."""
        parameters, attributes = dict(module._parameters), dict(module.__dict__)
        hooks = module._state_dict_hooks.copy(), module._load_state_dict_pre_hooks.copy()
        fresh: dict[str, nn.Parameter] = {}
        for name in ("weight", "bias"):
            stacked = module._parameters.pop(f"in_proj_{name}", None)
            if stacked is not None:
                for role, part in zip(ROLES, stacked.chunk(3), strict=True):
                    fresh[f"{role}_proj_{name}"] = _own(part, stacked.requires_grad)
        module._parameters.update(fresh)
        del module.__dict__["_qkv_same_embed_dim"]
        module.__dict__["_was_fused"] = "q_proj_weight" in fresh
        module.__class__ = cls
        exchange_keys(module, _fuse_attention_keys, _split_attention_keys)

        def undo() -> None:
            module.__class__ = nn.MultiheadAttention
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._state_dict_hooks, module._load_state_dict_pre_hooks = hooks

        return undo

    def rebuild(self) -> None:
        """Make it torch's own class again, with the present values."""
        trains = any(p.requires_grad for name, p in self.named_parameters() if name.startswith(("q_", "k_", "v_")))
        weight, bias, fused = self.in_proj_weight, self.in_proj_bias, self._was_fused
        for name in ("weight", "bias"):
            for role in ROLES:
                if name == "bias" or fused:
                    self._parameters[f"{role}_proj_{name}"] = None
        for role in ROLES:
            self._parameters.pop(f"{role}_proj_bias", None)
        del self.__dict__["_was_fused"]
        self.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
        self.__dict__["_qkv_same_embed_dim"] = fused
        self._parameters["in_proj_weight"] = None if weight is None else _own(weight, trains)
        self._parameters["in_proj_bias"] = None if bias is None else _own(bias, trains)
        for hooks, ours in (
            (self._state_dict_hooks, _fuse_attention_keys),
            (self._load_state_dict_pre_hooks, _split_attention_keys),
        ):
            for key, hook in list(hooks.items()):
                if getattr(hook, "hook", hook) is ours:
                    del hooks[key]


def _fuse_attention_keys(module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    for name in ("weight", "bias"):
        if name == "weight" and not module.__dict__["_was_fused"]:
            continue
        parts = [state.pop(f"{prefix}{role}_proj_{name}", None) for role in ROLES]
        if parts[0] is not None:
            state[f"{prefix}in_proj_{name}"] = torch.cat([part for part in parts if part is not None])


def _split_attention_keys(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    assert isinstance(module, nn.MultiheadAttention)
    for name in ("weight", "bias"):
        fused = state.get(f"{prefix}in_proj_{name}")
        if fused is not None and fused.shape[0] == 3 * module.embed_dim:
            del state[f"{prefix}in_proj_{name}"]
            for role, part in zip(ROLES, fused.chunk(3), strict=True):
                state[f"{prefix}{role}_proj_{name}"] = part.clone()


class Slice(nn.Module):
    """A projection without a matrix: head h reads channels h * head_dim and on of its input, or of the head `turn` further.

    With fewer key/value heads than query heads, a key/value head reads the slice of the first query head of its group.
    Exported as the matrix of zeros and ones that does the same.
    """

    like: Tensor

    def __init__(
        self, heads: int, head_dim: int, step: int, like: Tensor, bias: bool, transposed: bool = False, turn: int = 0
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.step, self.turn = heads, head_dim, step, turn
        self.has_bias, self.transposed = bias, transposed
        self.in_features, self.out_features = heads * head_dim * step, heads * head_dim
        self.register_buffer("like", like.detach().new_zeros(()), persistent=False)  # follows dtype and device
        exchange_keys(self, _write_slice, _read_slice)

    def forward(self, x: Tensor) -> Tensor:
        if self.turn:
            x = x.roll(-self.turn * self.head_dim, -1)
        if self.step == 1:
            return x
        return x.reshape(*x.shape[:-1], self.heads * self.step, self.head_dim)[..., :: self.step, :].flatten(-2)

    @property
    def weight(self) -> Tensor:
        """The matrix of zeros and ones, (out, in) or transposed as the family keeps it."""
        eye = torch.eye(self.in_features, dtype=self.like.dtype, device=self.like.device)
        eye = eye.roll(-self.turn * self.head_dim, 0)
        rows = eye.view(self.heads, self.step, self.head_dim, self.in_features)[:, 0].flatten(0, 1)
        return rows.t().contiguous() if self.transposed else rows

    @property
    def bias(self) -> Tensor | None:
        return self.like.new_zeros(self.out_features) if self.has_bias else None

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}, step={self.step}, turn={self.turn}"


def _write_slice(module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    assert isinstance(module, Slice)
    state[prefix + "weight"] = module.weight
    if module.bias is not None:
        state[prefix + "bias"] = module.bias


def _read_slice(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    _meta: Any,
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    assert isinstance(module, Slice)
    for name, own in (("weight", module.weight), ("bias", module.bias)):
        given = state.pop(prefix + name, None)
        if given is None or own is None or given.is_meta or own.is_meta:
            continue
        if given.shape != own.shape or not torch.equal(given.to(own), own):
            errors.append(f"{prefix}{name}: this head reads a slice, and the checkpoint holds another matrix")
