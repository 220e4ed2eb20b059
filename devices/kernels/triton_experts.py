"""The second half of a layer in Triton: output projection, router, experts and their weighted sum.

Each docstring says what one program of a kernel computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import (
    group_of,
    normed,
    passes_over,
    product,
    rounded,
    rows_in,
    statistics,
    tile_of,
    two_products,
)


@triton.jit
def output_projection(
    x_TX,
    table,
    residual_TD,
    out_TD,
    tokens,
    inputs,
    width,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply rows of x by rows of a matrix, for one tile, and add the residual; see `operators.output_projection`."""
    tile, part = tile_of(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.cdiv(width, OUTPUTS))
    t = tile * ROWS + tl.arange(0, ROWS)
    n = part * OUTPUTS + tl.arange(0, OUTPUTS)
    total = product(x_TX, t, t < tokens, table, part * OUTPUTS, width, inputs, BLOCKS, ROWS, OUTPUTS, COLUMNS)
    at = t.to(tl.int64)[None, :] * width + n[:, None]
    inside = (t[None, :] < tokens) & (n[:, None] < width)
    total += tl.load(residual_TD + at, inside, 0.0).to(tl.float32)
    tl.store(out_TD + at, rounded(total, x_TX.dtype.element_ty), inside)


@triton.jit
def route(
    hidden_TD,
    norm_D,
    table,
    x_TD,
    experts_Tk,
    weights_Tk,
    logits_TE,
    width,
    eps,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    LAYER: tl.constexpr,
    SUM_TO_ONE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise a token, compute its router logits, and choose its experts with weights; see `operators.route`."""
    dtype: tl.constexpr = hidden_TD.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    row_D = hidden_TD + t * width
    mean, scale = statistics(row_D, width, eps, LAYER, WIDTH)
    e = tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS, COLUMNS), dtype=tl.float32)
    for block in range(passes_over(table, 0, EXPERTS, BLOCKS)):
        rows, there = rows_in(table, block, 0, EXPERTS, width, BLOCKS, OUTPUTS, dtype)
        for start in range(0, width, COLUMNS):
            d = start + tl.arange(0, COLUMNS)
            x = normed(row_D, norm_D, d, width, mean, scale)
            tl.store(x_TD + t * width + d, x, d < width)
            weights = tl.load(rows + d[None, :], there[:, None] & (d[None, :] < width), 0.0)
            total += weights.to(tl.float32) * x.to(tl.float32)[None, :]
    logits = tl.sum(total, 1)
    tl.store(logits_TE + t * EXPERTS + e, logits, e < EXPERTS)
    # With ranks that are finite, TOP_K experts are chosen for any logits: no write is beyond the token's own results.
    ranks = tl.where(e < EXPERTS, tl.where(logits > -3e38, logits, -3e38), float("-inf"))
    left = ranks
    for _ in tl.static_range(TOP_K):
        left = tl.where(e == tl.argmax(left, 0), float("-inf"), left)
    chosen = left != ranks
    bad = tl.sum(((logits != logits) & (e < EXPERTS)).to(tl.int32), 0) > 0
    logits = tl.where(e < EXPERTS, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 0))
    weight = powers / tl.sum(tl.where(chosen, powers, 0.0) if SUM_TO_ONE else powers, 0)
    weight = tl.where(bad, float("nan"), weight)
    at = t * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(experts_Tk + at, e.to(tl.int64), chosen)
    tl.store(weights_Tk + at, weight, chosen)


@triton.jit
def sort_rows(
    experts_n,
    rows_n,
    pairs_n,
    starts_E,
    count,
    experts,
    PAIRS: tl.constexpr,
    READ: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Find the row of each of PAIRS pairs of token and expert: the pair's place once all pairs are sorted by expert.

    The row of each pair and the pair of each row are stored; the first program also stores `starts_E`.

    A pair's row is the number of pairs of lower experts, plus the number of earlier pairs of the pair's own expert.
    Pairs of earlier programs are counted by a histogram, pairs of this program are compared one by one.
    """
    own = tl.program_id(0) * PAIRS
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    earlier = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, count, READ):
        n = start + tl.arange(0, READ)
        expert = tl.load(experts_n + n, n < count, experts).to(tl.int32)
        total += tl.histogram(expert, EXPERTS)
        earlier += tl.histogram(tl.where(n < own, expert, experts), EXPERTS)
    e = tl.arange(0, EXPERTS)
    starts = tl.cumsum(total, 0) - total
    if own == 0:
        tl.store(starts_E + e, starts.to(tl.int64), e <= experts)
    n = own + tl.arange(0, PAIRS)
    m = own + tl.arange(0, PAIRS)
    expert = tl.load(experts_n + n, n < count, experts).to(tl.int32)
    other = tl.load(experts_n + m, m < count, experts).to(tl.int32)
    row = tl.sum(((other[None, :] == expert[:, None]) & (m[None, :] < n[:, None])).to(tl.int32), 1)
    row += tl.sum(tl.where(expert[:, None] == e[None, :], (starts + earlier)[None, :], 0), 1)
    tl.store(rows_n + n, row.to(tl.int64), n < count)
    tl.store(pairs_n + row, n, n < count)


@triton.jit
def gate_and_up(
    x_TD,
    pairs_n,
    starts_E,
    gates,
    ups,
    inner_nI,
    gated_nI,
    row_tiles,
    experts,
    width,
    intermediate,
    TOP_K: tl.constexpr,
    GATHERS: tl.constexpr,
    OBSERVED: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATE_BLOCKS: tl.constexpr,
    UP_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute silu(gate x) * up x for a tile of one expert's rows and outputs; see `operators.gate_and_up`."""
    tile, part = tile_of(tl.program_id(0), row_tiles, tl.cdiv(intermediate, OUTPUTS))
    expert, row, stop = group_of(starts_E, tile, experts, ROWS, EXPERTS)
    if row >= stop:
        return
    r = row + tl.arange(0, ROWS)
    n = part * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.load(pairs_n + r, r < stop, 0) // TOP_K if GATHERS else r
    gated, upped = two_products(
        x_TD,
        t,
        r < stop,
        gates + expert * 2 * GATE_BLOCKS,
        part * OUTPUTS,
        intermediate,
        ups + expert * 2 * UP_BLOCKS,
        part * OUTPUTS,
        intermediate,
        width,
        GATE_BLOCKS,
        UP_BLOCKS,
        1,
        ROWS,
        OUTPUTS,
        COLUMNS,
    )
    gated = gated / (1.0 + tl.exp(-gated))
    at = r.to(tl.int64)[None, :] * intermediate + n[:, None]
    inside = (r[None, :] < stop) & (n[:, None] < intermediate)
    tl.store(inner_nI + at, rounded(gated * upped, x_TD.dtype.element_ty), inside)
    if OBSERVED:
        tl.store(gated_nI + at, rounded(gated, x_TD.dtype.element_ty).to(tl.float32), inside)


@triton.jit
def down(
    inner_nI,
    starts_E,
    downs,
    y_nD,
    row_tiles,
    experts,
    intermediate,
    width,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply a tile of one expert's rows by a tile of rows of the expert's matrix down; see `operators.down`."""
    tile, part = tile_of(tl.program_id(0), row_tiles, tl.cdiv(width, OUTPUTS))
    expert, row, stop = group_of(starts_E, tile, experts, ROWS, EXPERTS)
    if row >= stop:
        return
    r = row + tl.arange(0, ROWS)
    n = part * OUTPUTS + tl.arange(0, OUTPUTS)
    table = downs + expert * 2 * BLOCKS
    total = product(
        inner_nI, r, r < stop, table, part * OUTPUTS, width, intermediate, BLOCKS, ROWS, OUTPUTS, COLUMNS
    )
    at = r.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(y_nD + at, rounded(total, y_nD.dtype.element_ty), (r[None, :] < stop) & (n[:, None] < width))


@triton.jit
def combine(
    y_nD, rows_Tk, weights_Tk, residual_TD, out_TD, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum up some columns of a token: its experts' weighted outputs, in ascending order of expert, and the residual."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row, weight = tl.load(rows_Tk + t * TOP_K + choice), tl.load(weights_Tk + t * TOP_K + choice)
        total += weight * tl.load(y_nD + row * width + d, d < width, 0.0).to(tl.float32)
    at = t * width + d
    total += tl.load(residual_TD + at, d < width, 0.0).to(tl.float32)
    tl.store(out_TD + at, rounded(total, out_TD.dtype.element_ty), d < width)
