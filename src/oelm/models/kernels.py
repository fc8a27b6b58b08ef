"""Triton kernels of the models. Imported on CUDA devices only; each has a plain form elsewhere that it must equal."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


BLOCK = 4096
EACH = 8  # elements that one thread loads at once
WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _join(high, total, x, LOG2E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of x taken into running maxima, and sums of exp(x - maximum)."""
    higher = tl.maximum(high, tl.max(x, 1))
    shift = higher * LOG2E
    return higher, total * tl.exp2(high * LOG2E - shift) + tl.sum(tl.exp2(x * LOG2E - shift[:, None]), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, stride, targets, nats, vocab, BLOCK: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row: nats = logsumexp - logit of the target; the row becomes softmax - one-hot, or zeros where there is no target.

    Arithmetic is what it waits for, next to memory: so a thread's EACH neighbours share one running maximum, which is
    joined with the others' once at the end; whole blocks go without masks, and are loaded 16 bytes at a time (a mask
    that ends at an odd place, the vocabulary's, would have every element loaded alone); and the one in one-hot is
    put in alone. The second reading hits the cache.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    ROWS: tl.constexpr = BLOCK // EACH
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    whole = vocab // BLOCK * BLOCK
    high = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for offset in range(0, whole, BLOCK):
        x = tl.load(start + offset + lanes).to(tl.float32)
        high, total = _join(high, total, x.reshape(ROWS, EACH), LOG2E)
    for offset in range(whole, stride, BLOCK):
        at = offset + lanes
        x = tl.load(start + at, mask=at < stride, other=0.0).to(tl.float32)
        x = tl.where(at < vocab, x, -float("inf"))
        high, total = _join(high, total, x.reshape(ROWS, EACH), LOG2E)
    top = tl.max(high, 0)
    lse = top * LOG2E + tl.log2(tl.sum(total * tl.exp2((high - top) * LOG2E), 0))
    counts = target >= 0
    hit = tl.load(start + tl.where(counts, target, 0)).to(tl.float32) * LOG2E
    tl.store(nats + row, tl.where(counts, (lse - hit) / LOG2E, 0.0))
    shift = tl.where(counts, lse, float("inf"))
    tl.debug_barrier()  # the target's logit must be read before the row is overwritten
    for offset in range(0, whole, BLOCK):
        x = tl.load(start + offset + lanes).to(tl.float32)
        tl.store(start + offset + lanes, tl.exp2(x * LOG2E - shift).to(logits.dtype.element_ty))
    for offset in range(whole, stride, BLOCK):
        at = offset + lanes
        x = tl.load(start + at, mask=at < stride, other=0.0).to(tl.float32)
        slope = tl.where(at < vocab, tl.exp2(x * LOG2E - shift), 0.0)
        tl.store(start + at, slope.to(logits.dtype.element_ty), mask=at < stride)
    tl.debug_barrier()  # and the row be written before the target's place in it is
    tl.store(start + target, (tl.exp2(hit - lse) - 1.0).to(logits.dtype.element_ty), mask=counts)


def cross_entropy_in_place(logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Nats of every row; `logits` (rows, at least vocab) becomes the gradient of their sum."""
    nats = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _cross_entropy[(logits.shape[0],)](
        logits, logits.stride(0), targets, nats, vocab, BLOCK=BLOCK, EACH=EACH, num_warps=WARPS
    )
    return nats
