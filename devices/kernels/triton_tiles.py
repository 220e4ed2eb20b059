"""Triton functions for norms and products of tiles, in which every sum has a fixed order.

A tile of a product has the outputs of some rows of a matrix for some rows of x. Each output is a sum over the inputs in
their order, for any size of tile: a row's bits depend neither on other rows nor on the cut of a matrix into pages.
`functions.py` explains the letters of shapes. All tensors are contiguous.

A matrix may be in several row blocks; a table of int64 has the first row and the address of each block. The rows of a
tile are read at 32-bit offsets from one address. A tile with rows in several blocks is read in one pass per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""True if Triton's interpreter runs the kernels, on the CPU."""
GROUP = tl.constexpr(16)
"""Number of tiles of rows whose programs run successively for the same outputs, whose weights stay in the cache."""


@triton.jit
def dot(a, b, total):
    """Return total + a @ b for a (M, K) and b (K, N); float32 is not rounded to TF32, as tensor cores would do."""
    if INTERPRETED:  # numpy's order of sums depends on the shape of a tile, which float64 hides
        wide = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)
        return total + wide.to(tl.float32)
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round float32 numbers to the nearest number of a dtype; ties go to the even one."""
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def tile_of(program, row_tiles, output_tiles):
    """Return the index of the tile of rows, and of the tile of outputs, that a program computes.

    GROUP (16) successive programs compute different tiles of rows for one tile of outputs; the next 16 programs compute
    the same tiles of rows for the next tile of outputs. So the rows of x and of the matrix are found in caches.
    """
    group = GROUP * output_tiles
    first = program // group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + program % group % height, program % group // height


@triton.jit
def group_of(starts, tile, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the group that contains tile number `tile`, the tile's first row, and the end of the group's rows.

    A group is the rows of an expert or of a sequence. All three values are 0 if there is no such tile. `starts`
    has the first row of each group, and then the number of rows.
    """
    g = tl.arange(0, GROUPS)
    first = tl.load(starts + g, g < groups, 0).to(tl.int32)
    stop = tl.load(starts + g + 1, g < groups, 0).to(tl.int32)
    tiles = (stop - first + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, 0) - tiles
    found = (before <= tile) & (tile < before + tiles)
    row = first + (tile - before) * ROWS
    return (
        tl.sum(tl.where(found, g, 0), 0),
        tl.sum(tl.where(found, row, 0), 0),
        tl.sum(tl.where(found, stop, 0), 0),
    )


@triton.jit
def statistics(row_D, width, eps, LAYER: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mean that a norm subtracts from a row, and the factor that it then multiplies by.

    LAYER: True for a layer norm; False for an RMS norm, whose mean is 0.
    """
    d = tl.arange(0, WIDTH)
    x = tl.load(row_D + d, d < width, 0.0).to(tl.float32)
    mean = tl.sum(x, 0) / width if LAYER else 0.0
    x = tl.where(d < width, x - mean, 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)


@triton.jit
def normed(row_D, norm_D, d, width, mean, scale):
    """Return entries d of a row, normalised by mean and scale, times the norm's weight, in the row's dtype."""
    x = tl.load(row_D + d, d < width, 0.0).to(tl.float32)
    weight = tl.load(norm_D + d, d < width, 0.0).to(tl.float32)
    return rounded((x - mean) * scale * weight, row_D.dtype.element_ty)


@triton.jit
def block_of(table, row, BLOCKS: tl.constexpr):
    """Return the index of the row block that holds row `row` of a matrix; table: each block's first row and address."""
    block = 0
    for later in tl.static_range(1, BLOCKS):
        block += (row >= tl.load(table + 2 * later)).to(tl.int32)
    return block


@triton.jit
def passes_over(table, first, stop, BLOCKS: tl.constexpr):
    """Return the number of row blocks that hold the rows from `first` to `stop` - 1."""
    return block_of(table, stop - 1, BLOCKS) - block_of(table, first, BLOCKS) + 1


@triton.jit
def rows_in(
    table,
    block,
    first,
    stop,
    width,
    BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
    STEP: tl.constexpr = 1,
):
    """Return pointers to OUTPUTS rows of a matrix, every STEP-th row from `first` on, and a mask of the rows to load.

    The mask is True for rows before `stop` in the row block with index `block`.
    """
    begin = tl.load(table + 2 * block, block < BLOCKS, stop)
    end = tl.load(table + 2 * block + 2, block + 1 < BLOCKS, stop)
    address = tl.load(table + 2 * block + 1, block < BLOCKS, 0).to(tl.pointer_type(DTYPE), bitcast=True)
    tile = tl.multiple_of(address + (first - begin) * width, 16)
    i = tl.arange(0, OUTPUTS) * STEP
    n = first + i
    return tile + i[:, None] * width, (n >= begin) & (n < tl.minimum(end, stop))


@triton.jit
def x_tile(x_TD, t, wanted, d, width):
    """Load entries d of rows t of x as a tile (inputs, rows); zeros for rows that are not wanted."""
    return tl.load(
        x_TD + t.to(tl.int64)[None, :] * width + d[:, None], wanted[None, :] & (d[:, None] < width), 0.0
    )


@triton.jit
def product(
    x_TD,
    t,
    wanted,
    table,
    first,
    rows,
    width,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply OUTPUTS rows of a matrix, from `first` on, by the rows t of x; returns a tile (outputs, rows), float32.

    Args:
        wanted: mask of the rows t to load.
        table: first row and address of each row block of the matrix.
        rows: number of rows of the matrix.
        width: number of inputs.
    """
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    stop = tl.minimum(first + OUTPUTS, rows)
    block = block_of(table, first, BLOCKS)
    for number in range(passes_over(table, first, stop, BLOCKS)):
        weights, there = rows_in(
            table, block + number, first, stop, width, BLOCKS, OUTPUTS, x_TD.dtype.element_ty
        )
        for start in range(0, width, COLUMNS):
            d = start + tl.arange(0, COLUMNS)
            x = x_tile(x_TD, t, wanted, d, width)
            tile = tl.load(weights + d[None, :], there[:, None] & (d[None, :] < width), 0.0)
            total = dot(tile, x, total)
    return total


@triton.jit
def two_products(
    x_TD,
    t,
    wanted,
    a_table,
    a_first,
    a_rows,
    b_table,
    b_first,
    b_rows,
    width,
    A_BLOCKS: tl.constexpr,
    B_BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply rows of matrices a and b by the same rows of x, which are read once; returns two tiles (outputs, rows).

    The arguments are as for `product`, and every STEP-th row of each matrix is taken, from `a_first` and `b_first` on.
    """
    dtype: tl.constexpr = x_TD.dtype.element_ty
    a_total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    b_total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    a_stop, b_stop = (
        tl.minimum(a_first + OUTPUTS * STEP, a_rows),
        tl.minimum(b_first + OUTPUTS * STEP, b_rows),
    )
    a_block, b_block = block_of(a_table, a_first, A_BLOCKS), block_of(b_table, b_first, B_BLOCKS)
    passes = tl.maximum(
        passes_over(a_table, a_first, a_stop, A_BLOCKS), passes_over(b_table, b_first, b_stop, B_BLOCKS)
    )
    for number in range(passes):
        a, a_there = rows_in(
            a_table, a_block + number, a_first, a_stop, width, A_BLOCKS, OUTPUTS, dtype, STEP
        )
        b, b_there = rows_in(
            b_table, b_block + number, b_first, b_stop, width, B_BLOCKS, OUTPUTS, dtype, STEP
        )
        for start in range(0, width, COLUMNS):
            d = start + tl.arange(0, COLUMNS)
            x = x_tile(x_TD, t, wanted, d, width)
            inside = d[None, :] < width
            a_total = dot(tl.load(a + d[None, :], a_there[:, None] & inside, 0.0), x, a_total)
            b_total = dot(tl.load(b + d[None, :], b_there[:, None] & inside, 0.0), x, b_total)
    return a_total, b_total
