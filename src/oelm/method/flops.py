"""Runs a model without its values (the meta device) and counts the FLOPs of a pass with torch's own counter.

Owns copies on meta and the guess of a model's inputs. Refuses models whose inputs cannot be guessed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from oelm.errors import MethodError


DEFAULT_LENGTH = 512


def on_meta(model: nn.Module) -> Any:
    """A copy with the model's shapes, ties, flags and record, and no values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def flops_of(model: nn.Module, arguments: Mapping[str, Tensor]) -> tuple[int, int]:
    """FLOPs of forward alone, and of forward and backward."""
    counter = FlopCounterMode(display=False)
    model.eval()  # dropout has no products; without it nothing depends on a random state
    _plainest(model)
    with counter, torch.enable_grad():
        loss = some_loss(model, arguments)
        forward = counter.get_total_flops()
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return forward, counter.get_total_flops()


def some_loss(model: nn.Module, arguments: Mapping[str, Tensor]) -> Tensor | None:
    """A number that every output has a share in; None where no output has a gradient."""
    output = model(**arguments)
    head = getattr(model, "logits", None)
    if getattr(model, "shape", None) is not None and callable(head):
        output = head(output)  # ours gives features, its head is called apart
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.float().sum() for t in leaves]).sum() if leaves else None


def _plainest(model: nn.Module) -> None:
    """Attention written out in products: the same FLOPs as the fast paths, which look at values or devices."""
    for module in model.modules():
        if isinstance(getattr(module, "fused", None), bool):  # ours
            module.fused = False  # type: ignore[assignment]
    for module in model.modules():
        config = getattr(module, "config", None)  # Hugging Face's; read at every call
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"  # type: ignore[union-attr]
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"  # type: ignore[union-attr]  # counts the experts in use


def quadratic_flops(
    model: nn.Module, make: Callable[[int, int], Mapping[str, Tensor]], batch: int, length: int, total: int
) -> int:
    """The part of `total` that grows with the square of the length: the attention scores and their use.

    A pass costs c + b·n + a·n² for n tokens; three lengths give a exactly, whatever the attention is made of.
    """
    if length < 3:
        return 0
    n0, n1, n2 = (Fraction(n) for n in (length, length - 1, length - 2))
    f0, f1, f2 = (total, *(flops_of(model, make(batch, int(n)))[1] for n in (n1, n2)))
    a = Fraction(f0) / ((n0 - n1) * (n0 - n2)) + f1 / ((n1 - n0) * (n1 - n2)) + f2 / ((n2 - n0) * (n2 - n1))
    return round(a * n0 * n0)


def is_causal(model: nn.Module) -> bool:
    """Whether every attention of the model looks only back."""
    shape = getattr(model, "shape", None)
    if shape is not None and hasattr(shape, "causal"):
        return bool(shape.causal)
    said = {bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")}
    return said == {True} or (not said and type(model).__name__.endswith("ForCausalLM"))


def default_length(model: nn.Module) -> int:
    """512 tokens, or as many as the model has positions for when that is less."""
    shape = getattr(model, "shape", None)
    config = getattr(model, "config", None)
    limit = getattr(shape, "context", None) or getattr(config, "max_position_embeddings", None)
    return min(DEFAULT_LENGTH, limit) if isinstance(limit, int) and limit > 0 else DEFAULT_LENGTH


def example_inputs(model: nn.Module, batch: int, length: int) -> dict[str, Tensor]:
    """Forward arguments of a Hugging Face model or of ours, on the meta device."""
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        names = list(inspect.signature(model.forward).parameters)
        if getattr(model, "shape", None) is None or not names:
            raise MethodError(
                f"FLOPs not counted: the inputs of {type(model).__name__} are not known; "
                "give inputs=lambda batch, length: {'name': tensor on the meta device}"
            )
        return {names[0]: ids}
    main = getattr(model, "main_input_name", "input_ids")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    arguments: dict[str, Tensor] = {}
    if main == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        arguments[main] = torch.empty(batch, config.num_channels, height, width, dtype=dtype, device="meta")
    elif main == "input_features":
        frames = 2 * config.max_source_positions
        arguments[main] = torch.empty(batch, config.num_mel_bins, frames, dtype=dtype, device="meta")
    else:
        arguments[main] = ids
    if getattr(config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = ids
    return arguments
