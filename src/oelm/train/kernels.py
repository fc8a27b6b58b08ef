"""Triton kernels of the optimiser: gradient norm, the decision whether a step happens, and AdamW over many tensors.

One launch serves every parameter through a table of addresses, so that neither clipping nor the copy of the weights
in half precision costs a pass over memory of its own. Imported on CUDA devices only; plain form: train/step.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


# A row of the table: addresses of master, working copy, gradient, mean, mean square; then the parameter's slot in
# `counts`, `rates` and `decays`, which all graphs share.
COLUMNS = 6


@triton.jit  # type: ignore[untyped-decorator]
def _address(table, row, column: tl.constexpr, F32: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.load(table + row * 6 + column)
    if F32:
        found = tl.multiple_of(number.to(tl.pointer_type(tl.float32)), 16)
    else:
        found = tl.multiple_of(number.to(tl.pointer_type(HALF)), 16)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _lanes(rows, starts, sizes, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row of the table, lanes, which are inside). EVEN: every size divides by 16, so loads may be wide."""
    program = tl.program_id(0)
    row = tl.load(rows + program)
    start = tl.load(starts + program)
    size = tl.load(sizes + row)
    if EVEN:
        size = tl.multiple_of(size, 16)
    lanes = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    return row, lanes, lanes < size


@triton.jit  # type: ignore[untyped-decorator]
def squares(  # type: ignore[no-untyped-def]
    table,
    rows,
    starts,
    sizes,
    partial,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    F32: tl.constexpr,
    HALF: tl.constexpr,
):
    """The sum of squares of one piece of one gradient."""
    row, lanes, inside = _lanes(rows, starts, sizes, BLOCK, EVEN)
    grad = tl.load(_address(table, row, 2, F32, HALF) + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0), tl.sum(grad * grad, 0))


@triton.jit  # type: ignore[untyped-decorator]
def decide(  # type: ignore[no-untyped-def]
    partial,
    pieces,
    loss,
    clip,
    scale,
    bad,
    bad_at,
    number,
    filled,
    losses,
    norms,
    counts,
    slots,
    parameters,
    BLOCK: tl.constexpr,
):
    """The norm, the factor that clips it, whether the step is good, and the record of it. One program."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, pieces, BLOCK):
        total += tl.load(partial + offset + lanes, mask=offset + lanes < pieces, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0))
    value = tl.load(loss)
    seen = value + norm
    good_now = (seen == seen) & (tl.abs(seen) < float("inf"))
    was_bad = tl.load(bad) > 0
    step = tl.load(number)
    tl.store(bad_at, step, mask=(~good_now) & (~was_bad))
    good = good_now & (~was_bad)
    tl.store(bad, tl.where(good, 0.0, 1.0))
    tl.store(scale, tl.where(clip > 0, tl.minimum(1.0, clip / (norm + 1e-6)), 1.0))
    slot = tl.load(filled)
    tl.store(losses + slot, value)
    tl.store(norms + slot, norm)
    tl.store(filled, slot + 1)
    for offset in range(0, parameters, BLOCK):
        inside = offset + lanes < parameters
        slot_of = tl.load(slots + offset + lanes, mask=inside, other=0)
        done = tl.load(counts + slot_of, mask=inside, other=0.0)
        tl.store(counts + slot_of, done + tl.where(good, 1.0, 0.0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def adamw(  # type: ignore[no-untyped-def]
    table,
    rows,
    starts,
    sizes,
    counts,
    rates,
    decays,
    factor,
    scale,
    bad,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    F32: tl.constexpr,
    HALF: tl.constexpr,
):
    """torch.optim.AdamW on one piece of one parameter, from float32 masters; the working copy is written beside it."""
    if tl.load(bad) == 0:
        row, lanes, inside = _lanes(rows, starts, sizes, BLOCK, EVEN)
        master = _address(table, row, 0, True, HALF) + lanes
        mean = _address(table, row, 3, True, HALF) + lanes
        square = _address(table, row, 4, True, HALF) + lanes
        grad = tl.load(_address(table, row, 2, F32, HALF) + lanes, mask=inside, other=0.0).to(tl.float32)
        grad = grad * tl.load(scale)
        slot = tl.load(table + row * 6 + 5)
        count = tl.load(counts + slot)
        rate = tl.load(rates + slot) * tl.load(factor)
        decay = tl.load(decays + slot)
        weight = tl.load(master, mask=inside, other=0.0)
        m = tl.load(mean, mask=inside, other=0.0)
        v = tl.load(square, mask=inside, other=0.0)
        m = m + rest1 * (grad - m)
        v = beta2 * v + rest2 * grad * grad
        correct1 = 1.0 - tl.exp(count * log_beta1)
        correct2 = tl.sqrt(1.0 - tl.exp(count * log_beta2))
        weight = weight * (1.0 - rate * decay)
        weight = weight - (rate / correct1) * m / (tl.sqrt(v) / correct2 + eps)
        tl.store(master, weight, mask=inside)
        tl.store(mean, m, mask=inside)
        tl.store(square, v, mask=inside)
        if not F32:
            tl.store(_address(table, row, 1, False, HALF) + lanes, weight.to(HALF), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def add_rows(  # type: ignore[no-untyped-def]
    grad,
    rows,
    ids,
    order,
    count,
    width,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad[id] += the sum of the rows of that id: an embedding's gradient without a second matrix of its size.

    `order` sorts the ids. The program at the first place of an id adds all its rows in float32 in a fixed order, so
    that the result is the same every time; the other programs leave.
    """
    place = tl.program_id(0)
    mine = tl.load(ids + tl.load(order + place))
    before = tl.load(ids + tl.load(order + tl.maximum(place, 1) - 1))
    if (place == 0) | (mine != before):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        wide = columns < width
        total = tl.zeros([BLOCK], tl.float32)
        at = place
        more = True
        while more:
            lanes = at + tl.arange(0, TILE)
            inside = lanes < count
            row = tl.load(order + lanes, mask=inside, other=0)
            same = inside & (tl.load(ids + row, mask=inside, other=-1) == mine)
            found = tl.load(
                rows + row.to(tl.int64)[:, None] * width + columns[None, :],
                mask=same[:, None] & wide[None, :],
                other=0.0,
            )
            total += tl.sum(found.to(tl.float32), 0)
            more = tl.sum(same.to(tl.int32), 0) == TILE
            at += TILE
        target = grad + mine.to(tl.int64) * width + columns
        summed = tl.load(target, mask=wide, other=0.0).to(tl.float32) + total
        tl.store(target, summed.to(grad.dtype.element_ty), mask=wide)
