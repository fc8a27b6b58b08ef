"""Self-attention with four whole projections q, k, v, o, computed as one product where that is faster.

Owns heads, rotary positions, masks' use and the cache of generation. Refuses freezing: it only looks at which
weights train, so that a frozen projection costs no weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.models.shapes import Shape


@dataclass
class LayerCache:
    """What one layer keeps of the tokens already read: keys after rotation, values, and the last key before add-ons."""

    keys: Tensor | None = None
    values: Tensor | None = None
    last_raw: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values up to now, with the new ones kept."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values


@dataclass
class Reading:
    """What all layers of one pass share: the rotation, the mask, where documents start."""

    rotation: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    causal: bool
    first: Tensor | None


class _FusedProjection(torch.autograd.Function):
    """x times several stacked matrices in one product; weight gradients only for those that train.

    Plain autograd through a concatenation would compute the gradient of every row and throw the frozen ones away.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, stacked: Tensor, trains: tuple[bool, ...], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, stacked)
        ctx.trains = trains
        ctx.rows = [w.shape[0] for w in weights]
        return F.linear(x, stacked)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, stacked = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        rows = x.flatten(0, -2)
        grad_x = (grad @ stacked).view_as(x) if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = []
        for start, end, sizes in _runs(ctx.rows, ctx.trains):
            if sizes is None:
                found.append(None)
            else:
                found.extend((grad[:, start:end].t() @ rows).split(sizes))
        return grad_x, None, None, *found


def _runs(sizes: list[int], trains: tuple[bool, ...]) -> list[tuple[int, int, list[int] | None]]:
    """Neighbouring matrices that train, as (first row, last row, sizes); None for one that does not."""
    runs: list[tuple[int, int, list[int] | None]] = []
    row = 0
    for size, train in zip(sizes, trains, strict=True):
        last = runs[-1] if runs else None
        if not train:
            runs.append((row, row + size, None))
        elif last is not None and last[2] is not None:
            runs[-1] = (last[0], row + size, [*last[2], size])
        else:
            runs.append((row, row + size, [size]))
        row += size
    return runs


def distinct_weights(linears: list[nn.Linear]) -> list[nn.Parameter]:
    """Their matrices, each once."""
    found: list[nn.Parameter] = []
    for linear in linears:
        if all(known is not linear.weight for known in found):
            found.append(cast(nn.Parameter, linear.weight))
    return found


def fused_projections(x: Tensor, linears: list[nn.Linear], stacked: Tensor | None = None) -> list[Tensor]:
    """What each Linear gives for x, computed as one product forward and as few as possible backward.

    A matrix that two of them share (K tied to Q) is multiplied once. stacked: the distinct matrices above each other,
    where somebody keeps them so; else they are copied together.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    distinct = distinct_weights(linears)
    places = [next(i for i, known in enumerate(distinct) if known is linear.weight) for linear in linears]
    trains = tuple(weight.requires_grad for weight in distinct)
    weights = [weight.to(dtype) for weight in distinct]
    if stacked is None or stacked.dtype != dtype:
        stacked = torch.cat([weight.detach() for weight in weights])
    product: Tensor = _FusedProjection.apply(x.to(dtype), stacked, trains, *weights)  # type: ignore[no-untyped-call]
    parts = torch.split(product, [w.shape[0] for w in weights], dim=-1)
    return [
        parts[place] if linear.bias is None else parts[place] + linear.bias.to(dtype)
        for place, linear in zip(places, linears, strict=True)
    ]


def _plain(module: nn.Module) -> bool:
    """Whether a projection is a Linear that nobody replaced, parametrised or hooked."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def rotation(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, shaped (rows, 1, positions, head_dim)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (rows, heads, positions, head_dim) turned by its positions; the two halves of a head are one pair each."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention. `addons` is None or a module (q, k, first, previous) -> (q, k) on (B, T, heads, head_dim)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads or shape.heads
        self.head_dim = shape.head_dim
        self.dropout = shape.dropout
        self.fused = True
        kv_width = self.kv_heads * self.head_dim
        self.q = nn.Linear(shape.width, shape.width, bias=shape.qkv_bias)
        self.k = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.v = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.o = nn.Linear(shape.width, shape.width, bias=shape.qkv_bias)
        self.addons: nn.Module | None = None
        self.stacked: Tensor | None = None  # q, k, v in one memory, while a captured step lends them so

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, T, heads, head_dim)."""
        if self.fused and _plain(self.q) and _plain(self.k) and _plain(self.v):
            q, k, v = fused_projections(x, [self.q, self.k, self.v], self.stacked)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        return (
            q.reshape(*x.shape[:-1], self.heads, self.head_dim),
            k.reshape(*x.shape[:-1], self.kv_heads, self.head_dim),
            v.reshape(*x.shape[:-1], self.kv_heads, self.head_dim),
        )

    def forward(self, x: Tensor, reading: Reading, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.project(x)
        if self.addons is not None:
            raw = k[:, -1:]
            q, k = self.addons(q, k, first=reading.first, previous=None if cache is None else cache.last_raw)
            if cache is not None:
                cache.last_raw = raw
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if reading.rotation is not None:
            q, k = rotate(q, *reading.rotation), rotate(k, *reading.rotation)
        if cache is not None:
            k, v = cache.extend(k, v)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=reading.mask,
            is_causal=reading.causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.o(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]
