"""A few trained scalars beside the projections: a gain per head, a gain per channel, shifted keys, a small matrix per head.

Owns the arithmetic (`Addons`), which our transformer calls itself. For other models see `attach`, which hooks the
projections' outputs. Refuses models in which an add-on could not be right, and says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.projections import Site
from oelm.method.variant import ADDONS


# sigmoid(0) = 1/2: a key starts as the mean of its token and the one before. From there AdamW reaches any mix within
# a few thousand steps of 1e-3, in every arm alike; from a value where sigmoid is nearly 0 a short run could not leave
# it, and an arm with shifted keys would be an arm without. Set `.shift` after `apply` to start elsewhere, as one may
# wish for pretrained weights that are kept.
SHIFT_START = 0.0


class Addons(nn.Module):
    """Trained scalars of one attention layer, applied to (B, T, heads, head_dim) before any rotation.

    query_mix (heads, head_dim, head_dim) multiplies each head's query and starts as the identity. head_gain (heads,) and channel_gain (heads, head_dim) multiply the query, so that a head's logits are scaled; they
    start at 1, exactly no change. shift (kv_heads, head_dim) mixes each key with its predecessor's:
    k_t <- (1 - sigmoid(mu)) k_t + sigmoid(mu) k_{t-1}; mu starts at 0. A position without a predecessor keeps k_t.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kinds: Iterable[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kinds = tuple(kinds)
        unknown = [kind for kind in kinds if kind not in ADDONS]
        if unknown or not kinds:
            raise MethodError(f"add-ons {list(kinds)!r}: name one or more of {', '.join(ADDONS)}")

        def filled(value: float, *size: int) -> nn.Parameter:
            return nn.Parameter(torch.full(size, value, dtype=dtype, device=device))

        self.kinds = kinds
        self.head_dim = head_dim
        self.head_gain = filled(1.0, heads) if "head-gain" in kinds else None
        self.channel_gain = filled(1.0, heads, head_dim) if "channel-gain" in kinds else None
        self.query_mix: nn.Parameter | None = None
        if "query-mix" in kinds:
            self.query_mix = nn.Parameter(torch.eye(head_dim, dtype=dtype, device=device).repeat(heads, 1, 1))
        self.shift = filled(SHIFT_START, kv_heads, head_dim) if "shift-keys" in kinds else None

    def forward(
        self, q: Tensor, k: Tensor, *, first: Tensor | None = None, previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys after the add-ons.

        first: bool (B or 1, T), true where a document starts; previous: the key before k[:, 0], as it was before the
        add-ons (B, 1, kv_heads, head_dim). Without either, position 0 has no predecessor.
        """
        return self.query(q), self.key(k, first=first, previous=previous)

    def query(self, q: Tensor) -> Tensor:
        """The query, mixed within its head and with its gains."""
        if self.query_mix is not None:
            q = torch.einsum("bthi,hij->bthj", q, self.query_mix.to(q.dtype))
        gain: Tensor | None = self.channel_gain
        if self.head_gain is not None:
            per_head = self.head_gain[:, None]
            gain = per_head if gain is None else gain * per_head
        return q if gain is None else (q * gain).to(q.dtype)

    def key(self, k: Tensor, *, first: Tensor | None = None, previous: Tensor | None = None) -> Tensor:
        """The key mixed with its predecessor's."""
        if self.shift is None:
            return k
        before = torch.cat((k[:, :1] if previous is None else previous.to(k.dtype), k[:, :-1]), dim=1)
        if first is not None:
            before = torch.where(first[..., None, None], k, before)
        return (k + torch.sigmoid(self.shift) * (before - k)).to(k.dtype)

    def extra_repr(self) -> str:
        return ", ".join(self.kinds)


def attach(model: nn.Module, sites: Sequence[Site], kinds: Iterable[str]) -> list[str]:
    """Put add-ons beside these attention modules; the names of the new parameters. Refuses before it changes anything.

    Ours calls them itself (`attn.addons`); a Hugging Face model gets hooks.
    """
    from oelm.method import hooked  # it builds on this module

    kinds = tuple(kinds)
    refuse(model, sites, kinds)
    readings: dict[int, hooked.Reading] = {}
    names = []
    for site in sites:
        addons: Addons
        if is_native(site):
            addons = Addons(site.n_heads, site.n_kv_heads, site.head_dim, kinds, **_kind(site))
        else:
            reading = None
            if "shift-keys" in kinds:
                stack = hooked.stack_of(model, site)
                assert stack is not None  # refuse() looked
                if id(stack) not in readings:
                    readings[id(stack)] = hooked.Reading(stack)
                    stack.register_forward_pre_hook(readings[id(stack)].begin, with_kwargs=True)
                reading = readings[id(stack)]
            addons = hooked.HookedAddons(site, kinds, reading, **_kind(site))
            addons.hook(site)
        site.module.addons = addons
        names += [f"{site.name}.addons.{name}" for name, _ in addons.named_parameters()]
    return names


def _kind(site: Site) -> dict[str, Any]:
    """Type and device of a module's weights."""
    like = next((p.parameter for p in site.parts.values() if p.parameter is not None), None)
    if like is None:
        like = next(site.module.parameters())
    return {"dtype": like.dtype, "device": like.device}


def is_native(site: Site) -> bool:
    """Whether the attention module calls its add-ons itself, as ours does."""
    return "addons" in site.module.__dict__ or "addons" in site.module._modules


def refuse(model: nn.Module, sites: Sequence[Site], kinds: Iterable[str]) -> None:
    """Raise where an add-on cannot be right, with the reason."""
    from oelm.method import hooked

    kinds = tuple(kinds)
    gains = [kind for kind in kinds if kind != "shift-keys"]
    for site in sites:
        if is_native(site):
            continue
        where = f"{site.name} ({type(site.module).__name__})"
        for role in ("q", "k"):
            part = site.parts.get(role)
            if part is None or part.module is site.module:
                raise MethodError(
                    f"add-ons {', '.join(kinds)}: {where} computes its projections inside one function, so their outputs "
                    "cannot be reached; choose a variant without add-ons"
                )
        if "shift-keys" not in kinds:
            continue
        without = f"use {' and '.join(gains)} alone" if gains else "choose head-gain or channel-gain"
        if site.cross:
            raise MethodError(
                f"shift-keys: {where} is cross-attention, whose keys are another sequence's; set cross = false, or {without}"
            )
        if not site.family.plain:
            raise MethodError(
                f"shift-keys: the key projection of {where} also reads relative positions, which have no predecessor; {without}"
            )
        if hooked.stack_of(model, site) is None:
            raise MethodError(
                f"shift-keys: {where} is in no Hugging Face model, so padding and document starts are unknown; {without}"
            )
