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

    The running maximum and sum are kept for each lane and joined once: a reduction over the block in every turn of
    the loop costs more than reading the row. The second reading hits the cache. Padding is read and then hidden: a mask
    that ends at an odd place (the vocabulary's) would have every element loaded alone.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    high = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, stride, BLOCK):
        at = offset + lanes
        x = tl.load(start + at, mask=at < stride, other=0.0).to(tl.float32)
        x = tl.where(at < vocab, x, -float("inf"))
        higher = tl.maximum(high, x)
        shrink = tl.exp2((tl.minimum(high, x) - higher) * LOG2E)
        total = tl.where(x > high, total * shrink + 1.0, total + shrink)
        high = higher
    top = tl.max(high, 0)
    lse = top + tl.log(tl.sum(total * tl.exp2((high - top) * LOG2E), 0))
    counts = target >= 0
    hit = tl.load(start + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(nats + row, tl.where(counts, lse - hit, 0.0))
    weight = tl.where(counts, 1.0, 0.0)
    tl.debug_barrier()  # the target's logit must be read before the row is overwritten
    for offset in range(0, stride, BLOCK):
        at = offset + lanes
        x = tl.load(start + at, mask=at < stride, other=0.0).to(tl.float32)
        x = tl.where(at < vocab, x, -float("inf"))
        slope = tl.exp2((x - lse) * LOG2E)
        slope = tl.where(at == target, slope - 1.0, slope) * weight
        tl.store(start + at, slope.to(logits.dtype.element_ty), mask=at < stride)


def cross_entropy_in_place(logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Nats of every row; `logits` (rows, at least vocab) becomes the gradient of their sum."""
    nats = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _cross_entropy[(logits.shape[0],)](logits, logits.stride(0), targets, nats, vocab, BLOCK=BLOCK, num_warps=WARPS)
    return nats
