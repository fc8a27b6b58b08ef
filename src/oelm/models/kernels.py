"""Triton kernels of the models. Imported on CUDA devices only; each has a plain form elsewhere that it must equal."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


BLOCK = 4096
WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, stride, targets, nats, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row: nats = logsumexp - logit of the target; the row becomes softmax - one-hot, or zeros where there is no target.

    The unit for exponentials bounds this kernel, so each is taken once: the first pass leaves them in the row, the
    second scales them. They are taken beside a reference instead of the maximum, which would need a pass of its own:
    the highest of the first block plus 60. Its exponential is above 1e-26, and a logit would have to be 148 above all
    of the first block to overflow; the loss is infinite then, and the step is refused as diverged.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    counts = target >= 0
    place = start + tl.where(counts, target, 0)
    hit = tl.load(place).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    first = tl.load(start + lanes, mask=lanes < vocab, other=-float("inf")).to(tl.float32)
    reference = tl.max(first, 0) + 60.0
    shift = reference * LOG2E
    tl.debug_barrier()  # nobody writes before everybody has read the target's logit
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, stride, BLOCK):
        at = offset + lanes
        x = tl.load(start + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        power = tl.exp2(x * LOG2E - shift)
        total += power
        tl.store(start + at, power.to(logits.dtype.element_ty), mask=at < stride)
    whole = tl.sum(total, 0)
    lse = reference + tl.log(whole)
    tl.store(nats + row, tl.where(counts, lse - hit, 0.0))
    scale = tl.where(counts, 1.0 / whole, 0.0)
    for offset in range(0, stride, BLOCK):
        at = offset + lanes
        power = tl.load(start + at, mask=at < stride, other=0.0).to(tl.float32)
        tl.store(start + at, (power * scale).to(logits.dtype.element_ty), mask=at < stride)
    tl.debug_barrier()  # the target's own slope is mended after everybody has written
    mended = tl.exp2(hit * LOG2E - shift) * scale - 1.0
    tl.store(place, mended.to(logits.dtype.element_ty), mask=counts)


def cross_entropy_in_place(logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Nats of every row; `logits` (rows, at least vocab) becomes the gradient of their sum."""
    nats = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _cross_entropy[(logits.shape[0],)](logits, logits.stride(0), targets, nats, vocab, BLOCK=BLOCK, num_warps=WARPS)
    return nats
