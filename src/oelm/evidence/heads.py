"""The inside of attention, for our transformer and for Hugging Face models: every head's logits, and its matrices.

Owns how they are read out; what they say is measured in probes.py. Refuses a model whose attention cannot be watched
(few families still compute it in a way of their own).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oelm.errors import ConfigError


if TYPE_CHECKING:
    from torch import Tensor, nn

WATCHED = "oelm-watched"  # the name of our attention function in transformers' table
# The norm that a block puts before its attention, by name; a block without one feeds the hidden state itself.
NORMS = ("norm1", "ln_1", "input_layernorm", "layernorm_before", "ln1", "norm_1", "self_attn_layer_norm", "layer_norm")


@dataclass(frozen=True)
class Layer:
    """One self-attention layer's matrices by head, (heads, head width, width); None where a role has no matrix."""

    heads: int
    q: Tensor | None
    k: Tensor | None  # keys and values shared by several query heads stand once for each of them
    v: Tensor | None
    o: Tensor | None  # (heads, head width, width): what each head writes
    norm: nn.Module | None  # what the block does to its input before attention


def layers(model: nn.Module) -> list[Layer]:
    """The self-attention layers in order."""
    from oelm.method.projections import find_sites

    inner: Any = getattr(model, "inner", model)
    modules = dict(inner.named_modules())
    found = []
    for site in find_sites(inner):
        if site.cross:
            continue
        by_role: dict[str, Any] = {}
        for role in ("q", "k", "v", "o"):
            rows = site.parts[role].rows() if role in site.parts else None
            if rows is not None and role == "o":
                rows = rows.float().t().reshape(site.n_heads, site.head_dim, -1)
            elif rows is not None:
                rows = rows.float().reshape(site.heads(role), site.head_dim, -1)
                rows = rows.repeat_interleave(site.n_heads // site.heads(role), dim=0)
            by_role[role] = rows
        block = modules.get(site.block)
        children = dict(block.named_children()) if block is not None else {}
        norm = next((children[name] for name in NORMS if name in children), None)
        found.append(Layer(heads=site.n_heads, **by_role, norm=norm))
    return found


def watch(model: nn.Module, ids: Tensor, given: Mapping[str, Tensor], see: Callable[[Tensor], None]) -> None:
    """Let the model read; `see` gets the logits of one self-attention layer after the other.

    Logits are (rows, heads, T, T) as the model itself computes them; -inf where a token is not seen.
    """
    from oelm.models.gpt import GPT

    (_of_gpt if isinstance(model, GPT) else _of_hosted)(model, ids, given, see)


def _of_gpt(model: Any, ids: Tensor, given: Mapping[str, Tensor], see: Callable[[Tensor], None]) -> None:
    import torch

    from oelm.models.attention import rotate

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        x, reading = arguments[0], arguments[1]
        q, k, _ = module.project(x)
        if module.addons is not None:
            q, k = module.addons(q, k, first=reading.first, previous=None)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if reading.rotation is not None:
            q, k = rotate(q, *reading.rotation), rotate(k, *reading.rotation)
        k = k.repeat_interleave(module.heads // module.kv_heads, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(module.head_dim)
        if reading.causal:
            length = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        elif reading.mask is not None:
            scores = scores.masked_fill(~reading.mask, -math.inf)
        see(scores)

    hooks = [block.attn.register_forward_pre_hook(look) for block in model.blocks]
    try:
        model(ids, **given)
    finally:
        for hook in hooks:
            hook.remove()


def _of_hosted(model: Any, ids: Tensor, given: Mapping[str, Tensor], see: Callable[[Tensor], None]) -> None:
    """Through transformers' own door: an attention function of ours, which computes what eager attention does."""
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    from oelm.method.projections import find_sites

    wanted = {id(site.module) for site in find_sites(model.inner) if not site.cross}
    met: list[int] = []

    def watched(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scaling = more.get("scaling")
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if more.get("softcap") is not None:
            scores = torch.tanh(scores / more["softcap"]) * more["softcap"]
        if attention_mask is not None:
            scores = scores + attention_mask[..., : key.shape[-2]]
        attention = scores.softmax(-1)
        if id(module) in wanted:
            met.append(id(module))
            see(scores.float().masked_fill(scores <= torch.finfo(scores.dtype).min / 2, -math.inf))
        return (attention @ value).transpose(1, 2).contiguous(), attention

    inner = model.inner
    before = inner.config._attn_implementation
    AttentionInterface.register(WATCHED, watched)
    AttentionMaskInterface.register(WATCHED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        inner.set_attn_implementation(WATCHED)
        model(ids, **given)
    except (ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{inner.config.model_type}: its attention cannot be watched ({error})") from None
    finally:
        inner.set_attn_implementation(before)
    if set(met) != wanted:
        raise ConfigError(f"{inner.config.model_type}: computes attention in its own way, which probes cannot read")
