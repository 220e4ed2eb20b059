"""Tiles of rows and matrices in Triton, and products of them in a fixed order of sums.

Tiles are chosen by the shapes of weights alone, so that a row's bits depend on no other row, and on no cut of a matrix
into pages. Shapes in names are those of `functions.py`. All tensors are contiguous.

A matrix of N rows may be in several row blocks. A table of int64 has the first row and the address of each, and
`rows_of` finds a row's block in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""True if Triton's interpreter runs the kernels, on the CPU."""


@triton.jit
def dot(a, b, total):
    """The total plus a product (M, K) by (K, N), without the rounding of tensor cores in float32."""
    if INTERPRETED:  # numpy's product has another order of sums for each row of a tile
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Float32 rounded to the nearest number of a type; of two to the even one."""
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rows_of(table, n, columns, BLOCKS: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to some rows of a matrix in row blocks."""
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = tl.load(table + 1) + n.to(tl.int64) * columns * size
    for block in tl.static_range(1, BLOCKS):
        first = tl.load(table + 2 * block)
        own = tl.load(table + 2 * block + 1) + (n - first).to(tl.int64) * columns * size
        address = tl.where(n >= first, own, address)
    return tl.multiple_of(address, 16).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def statistics(x_TD, t, tokens, width, eps, LAYER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The mean of each row, 0 for a root mean square, and the reciprocal of its deviation."""
    mean = tl.zeros((ROWS,), dtype=tl.float32)
    if LAYER:
        for start in range(0, width, COLUMNS):
            d = start + tl.arange(0, COLUMNS)
            inside = (t[:, None] < tokens) & (d[None, :] < width)
            mean += tl.sum(tl.load(x_TD + t[:, None] * width + d[None, :], inside, 0.0).to(tl.float32), 1)
        mean = mean / width
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = (t[:, None] < tokens) & (d[None, :] < width)
        x = tl.load(x_TD + t[:, None] * width + d[None, :], inside, 0.0).to(tl.float32)
        x = tl.where(inside, x - mean[:, None], 0.0)
        squares += tl.sum(x * x, 1)
    return mean, 1.0 / tl.sqrt(squares / width + eps)


@triton.jit
def normed(x_TD, norm_D, t, d, inside, width, mean, scale):
    """A tile of normalised rows, rounded to their type."""
    x = tl.load(x_TD + t[:, None] * width + d[None, :], inside, 0.0).to(tl.float32)
    weight = tl.load(norm_D + d, d < width, 0.0).to(tl.float32)
    return rounded((x - mean[:, None]) * scale[:, None] * weight[None, :], x_TD.dtype.element_ty)


@triton.jit
def product(
    x_TD, t, wanted, rows, there, width, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows t of x by rows of a matrix, float32; only `wanted` rows of x and rows of the matrix that are `there`."""
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = d[None, :] < width
        x = tl.load(x_TD + t[:, None] * width + d[None, :], wanted[:, None] & inside, 0.0)
        weights = tl.load(rows[:, None] + d[None, :], there[:, None] & inside, 0.0)
        total = dot(x, tl.trans(weights), total)
    return total
