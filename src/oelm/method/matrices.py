"""Draws the matrices of attention heads from (seed, stack, layer, role), equal to the last bit on every machine.

Only additions, products, quotients and square roots of whole arrays are used, each in an order that the source
fixes: no BLAS, no LAPACK, no library sum, no libm. So neither threads, SIMD width, device nor the order of layers
can change a bit, which LAPACK's QR does not promise. Everything is float64 here; the caller casts.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from oelm.errors import MethodError


Array: TypeAlias = npt.NDArray[np.float64]

_LN2 = math.log(2.0)
_CACHED = 5_000_000  # bytes of blocks that are worked on together: what a core's cache holds
_DEPENDENT = 1e-9  # a row whose new part is this small beside the row itself adds no direction


def draw(
    init: str,
    heads: int,
    head_dim: int,
    width: int,
    *,
    seed: int,
    stack: str,
    layer: int,
    role: str,
    scope: str = "head",
    gain: float = 1.0,
    std: float | None = None,
) -> Array:
    """A fresh matrix as (heads, head_dim, width): `orthogonal` or `gaussian`, times `gain`.

    Orthogonal heads have orthonormal rows (of the `(head_dim, width)` block), so both kinds have entries of variance
    1/width. A whole orthogonal matrix with more rows than columns has orthonormal columns, scaled to that variance.
    """
    values = gaussian(heads * head_dim * width, seed, stack, layer, role).reshape(heads, head_dim, width)
    if init == "gaussian":
        return values * (std if std is not None else gain / math.sqrt(width))
    if init == "orthogonal":
        return orthonormal(values, scope, gaussian=True) * gain
    raise MethodError(f"init {init!r} draws nothing; use orthogonal or gaussian")


def orthonormal(values: Array, scope: str = "head", *, gaussian: bool = False) -> Array:
    """The sign-fixed Q factor of every head's block (or of the whole matrix), as (heads, head_dim, width).

    `gaussian` says that the values are independent normal numbers, whose rows are known to be far from dependent.
    """
    heads, head_dim, width = values.shape
    if scope == "head":
        if head_dim > width:
            raise MethodError(
                f"a head of {head_dim} channels has no orthonormal rows of width {width}; "
                'use init = "gaussian" or scope = "matrix"'
            )
        return _orthonormal_rows(values, gaussian)
    rows = heads * head_dim
    whole = values.reshape(1, rows, width)
    if rows <= width:
        return _orthonormal_rows(whole, gaussian).reshape(values.shape)
    columns = _orthonormal_rows(np.ascontiguousarray(whole.transpose(0, 2, 1)), gaussian).transpose(0, 2, 1)
    return columns.reshape(values.shape) * math.sqrt(rows / width)


def gaussian(count: int, seed: int, stack: str, layer: int, role: str) -> Array:
    """Standard normal numbers by Marsaglia's polar method on the raw stream of Philox, whose bits numpy promises."""
    name = f"oelm 1|{seed}|{stack}|{layer}|{role}".encode()
    bits = np.random.Philox(key=int.from_bytes(hashlib.sha256(name).digest()[:16], "little"))
    found: list[Array] = []
    missing = count
    while missing > 0:
        raw = bits.random_raw(2 * (int(missing * 0.66) + 64))  # pi/4 of the pairs fall inside the circle
        unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
        u, v = unit[0::2], unit[1::2]
        square = u * u + v * v
        inside = (square > 0.0) & (square < 1.0)
        u, v, square = u[inside], v[inside], square[inside]
        factor = np.sqrt(-2.0 * _log(square) / square)
        found.append(np.stack([u * factor, v * factor], axis=1).reshape(-1)[:missing])
        missing -= len(found[-1])
    return np.concatenate(found)


def _log(x: Array) -> Array:
    """The natural logarithm in fixed arithmetic: libm's and SIMD's last bits differ between machines."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    exponent = np.where(low, exponent - 1, exponent).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / 25.0)
    for odd in range(23, 0, -2):
        series = series * square + 1.0 / odd
    return exponent * _LN2 + 2.0 * s * series


def _orthonormal_rows(blocks: Array, gaussian: bool) -> Array:
    """Modified Gram-Schmidt over the rows of every (rows, width) block; R's diagonal is positive.

    One pass loses as many digits as the block's condition number has: none worth naming in a Gaussian at least twice
    as wide as high. For anything else a second pass brings the error down to a few rounding units.
    """
    basis = np.array(blocks, dtype=np.float64, order="C")
    _, rows, width = basis.shape
    passes = 1 if gaussian and 2 * rows <= width else 2
    together = max(1, _CACHED // basis[0].nbytes)
    for start in range(0, len(basis), together):
        for _ in range(passes):
            _gram_schmidt(basis[start : start + together], start)
    return basis


def _gram_schmidt(basis: Array, first: int) -> None:
    rows = basis.shape[1]
    before = np.sqrt(_sum_last(basis * basis))
    scratch = np.empty_like(basis)
    for j in range(rows):
        row = basis[:, j, :]
        norm = np.sqrt(_sum_last(row * row))
        if not np.all(norm > _DEPENDENT * before[:, j]):
            block = first + int(np.argmin(norm > _DEPENDENT * before[:, j]))
            raise MethodError(
                f"row {j} of block {block} depends on the rows before it (or is zero or not finite), "
                "so there is nothing to orthogonalise; draw it anew"
            )
        row /= norm[:, None]
        rest = basis[:, j + 1 :, :]
        product = scratch[:, j + 1 :, :]
        np.multiply(rest, row[:, None, :], out=product)
        share = _sum_last(product)
        np.multiply(share[:, :, None], row[:, None, :], out=product)
        np.subtract(rest, product, out=rest)


def _sum_last(values: Array) -> Array:
    """The sum over the last axis by halving: one fixed tree of additions. Overwrites nothing."""
    while (size := values.shape[-1]) > 1:
        half = size // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        if size % 2:
            folded[..., 0] += values[..., -1]
        values = folded
    return values[..., 0]
