"""The vocabulary loss as one kernel between three matrix products, for CUDA devices with Triton.

The logits are made once, in bfloat16 and padded to a width the tensor cores like; one kernel replaces them by
softmax minus one-hot in place. No float32 copy of them ever exists. Equal to `plain_vocabulary_loss` within the
rounding of the logits. Owns the kernel and its autograd; refuses to choose: `oelm.models.vocabulary` does.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


TRITON = importlib.util.find_spec("triton") is not None
LANES = 64  # logits' rows start on this many elements: unaligned rows cost the products a factor of seven on an H200


def usable(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Whether the fused form can take these features, computed in this precision."""
    return hidden.is_cuda and dtype == torch.bfloat16 and TRITON


def padded_rows(vocab: int) -> int:
    """The vocabulary's size rounded up to whole lanes."""
    return -(-vocab // LANES) * LANES


def _padded(weight: Tensor) -> Tensor:
    """The matrix with zero rows up to whole lanes: in place where its storage has room for them, else a copy."""
    rows, width = weight.shape
    wanted = padded_rows(rows)
    if wanted == rows:
        return weight
    room = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    if weight.is_contiguous() and room >= wanted * width:
        return weight.as_strided((wanted, width), (width, 1))
    return F.pad(weight, (0, 0, 0, wanted - rows))


@torch.library.custom_op("oelm::vocabulary_slope", mutates_args=())
def _slope(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(nats of each row, gradient of their sum by the logits, padded)."""
    from oelm.models.kernels import cross_entropy_in_place

    logits = hidden @ _padded(weight).t()
    return cross_entropy_in_place(logits, targets, weight.shape[0]), logits


@_slope.register_fake
def _slope_shapes(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows = hidden.shape[0]
    return hidden.new_empty(rows, dtype=torch.float32), hidden.new_empty(rows, padded_rows(weight.shape[0]))


@torch.library.custom_op("oelm::vocabulary_backward", mutates_args=())
def _backward(
    slope: Tensor, hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients by hidden and weight."""
    empty = hidden.new_empty(0)
    by_hidden = slope @ _padded(weight) if want_hidden else empty
    by_weight = (slope.t() @ hidden)[: weight.shape[0]] if want_weight else empty.clone()
    return by_hidden, by_weight


@_backward.register_fake
def _backward_shapes(
    slope: Tensor, hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    empty = hidden.new_empty(0)
    return (
        torch.empty_like(hidden) if want_hidden else empty,
        torch.empty_like(weight) if want_weight else empty.clone(),
    )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[0], inputs[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else a zero gradient as large as the logits would be written


def _grads(ctx: Any, by_nats: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    slope, hidden, weight = ctx.saved_tensors
    want_hidden, want_weight = ctx.needs_input_grad[:2]
    # The nats are summed below, so every row has the same scale. It goes onto the small matrix of each product, and
    # stands outside the operator, where the compiler makes it part of its neighbours.
    scale = by_nats[0].to(hidden.dtype)
    by_hidden, by_weight = _backward(slope, hidden * scale, weight, want_hidden, want_weight)
    return by_hidden * scale if want_hidden else None, by_weight if want_weight else None, None


_slope.register_autograd(_grads, setup_context=_keep)


def fused_vocabulary_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of nats over rows of hidden (rows, width) against weight (vocab, width); both bfloat16."""
    nats, _ = _slope(hidden, weight, targets)
    return nats.sum()  # type: ignore[no-any-return]
