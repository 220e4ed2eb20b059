"""The second half of a layer in Triton: output projection, router, experts and their weighted sum."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import dot, normed, product, rounded, rows_of, statistics


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
    """The product with a matrix (D, X), and the residual."""
    dtype: tl.constexpr = x_TX.dtype.element_ty
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = rows_of(table, n, inputs, BLOCKS, dtype)
    total = product(x_TX, t, t < tokens, rows, n < width, inputs, ROWS, OUTPUTS, COLUMNS)
    at, inside = t[:, None] * width + n[None, :], (t[:, None] < tokens) & (n[None, :] < width)
    total += tl.load(residual_TD + at, inside, 0.0).to(tl.float32)
    tl.store(out_TD + at, rounded(total, dtype), inside)


@triton.jit
def route(
    hidden_TD,
    norm_D,
    table,
    x_TD,
    experts_Tk,
    weights_Tk,
    logits_TE,
    tokens,
    width,
    eps,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    LAYER: tl.constexpr,
    SUM_TO_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Norm, the router's logits in float32, and the experts of each token, ascending, with their weights."""
    dtype: tl.constexpr = hidden_TD.dtype.element_ty
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, OUTPUTS)
    rows = rows_of(table, e, width, BLOCKS, dtype)
    mean, scale = statistics(hidden_TD, t, tokens, width, eps, LAYER, ROWS, COLUMNS)
    logits = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = (t[:, None] < tokens) & (d[None, :] < width)
        x = normed(hidden_TD, norm_D, t, d, inside, width, mean, scale)
        tl.store(x_TD + t[:, None] * width + d[None, :], x, inside)
        weights = tl.load(rows[:, None] + d[None, :], (e[:, None] < EXPERTS) & (d[None, :] < width), 0.0)
        logits = dot(x.to(tl.float32), tl.trans(weights).to(tl.float32), logits)
    known = (t[:, None] < tokens) & (e[None, :] < EXPERTS)
    tl.store(logits_TE + t[:, None] * EXPERTS + e[None, :], logits, known)
    logits = tl.where(e[None, :] < EXPERTS, logits, float("-inf"))
    left = logits
    for _ in tl.static_range(TOP_K):
        best = tl.argmax(left, 1)
        left = tl.where(e[None, :] == best[:, None], float("-inf"), left)
    chosen = (left != logits) & (e[None, :] < EXPERTS)
    highest = tl.max(logits, 1)
    powers = tl.exp(logits - highest[:, None])
    total = tl.sum(tl.where(chosen, powers, 0.0) if SUM_TO_ONE else powers, 1)
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    at = t[:, None] * TOP_K + place
    kept = chosen & (t[:, None] < tokens)
    tl.store(experts_Tk + at, tl.broadcast_to(e[None, :], (ROWS, OUTPUTS)).to(tl.int64), kept)
    tl.store(weights_Tk + at, powers / total[:, None], kept)


@triton.jit
def sort_rows(
    experts_n, rows_n, pairs_n, starts_E, count, experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr
):
    """The row of each pair of token and expert, sorted by expert, and the first row of each expert; one program."""
    for start in range(0, count, PAIRS):
        n = start + tl.arange(0, PAIRS)
        own = tl.load(experts_n + n, n < count, experts)
        row = tl.zeros((PAIRS,), dtype=tl.int32)
        for other in range(0, count, PAIRS):
            m = other + tl.arange(0, PAIRS)
            theirs = tl.load(experts_n + m, m < count, experts)
            before = (theirs[None, :] < own[:, None]) | (
                (theirs[None, :] == own[:, None]) & (m[None, :] < n[:, None])
            )
            row += tl.sum(before.to(tl.int32), 1)
        tl.store(rows_n + n, row.to(tl.int64), n < count)
        tl.store(pairs_n + row, n, n < count)
    e = tl.arange(0, EXPERTS)
    starts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, count, PAIRS):
        n = start + tl.arange(0, PAIRS)
        own = tl.load(experts_n + n, n < count, experts)
        starts += tl.sum((own[None, :] < e[:, None]).to(tl.int32), 1)
    tl.store(starts_E + e, starts.to(tl.int64), e <= experts)


@triton.jit
def gate_and_up(
    x_TD,
    pairs_n,
    starts_E,
    gates,
    ups,
    inner_nI,
    width,
    intermediate,
    TOP_K: tl.constexpr,
    GATHERS: tl.constexpr,
    GATE_BLOCKS: tl.constexpr,
    UP_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """silu(gate x) * up x of one expert's rows, for some of its outputs."""
    dtype: tl.constexpr = x_TD.dtype.element_ty
    expert = tl.program_id(0)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first, stop = tl.load(starts_E + expert), tl.load(starts_E + expert + 1)
    gate = rows_of(gates + expert * 2 * GATE_BLOCKS, n, width, GATE_BLOCKS, dtype)
    up = rows_of(ups + expert * 2 * UP_BLOCKS, n, width, UP_BLOCKS, dtype)
    for row in range(first, stop, ROWS):
        r = row + tl.arange(0, ROWS)
        t = tl.load(pairs_n + r, r < stop, 0) // TOP_K if GATHERS else r
        gated = product(x_TD, t, r < stop, gate, n < intermediate, width, ROWS, OUTPUTS, COLUMNS)
        upped = product(x_TD, t, r < stop, up, n < intermediate, width, ROWS, OUTPUTS, COLUMNS)
        inner = gated / (1.0 + tl.exp(-gated)) * upped
        at = r[:, None] * intermediate + n[None, :]
        tl.store(inner_nI + at, rounded(inner, dtype), (r[:, None] < stop) & (n[None, :] < intermediate))


@triton.jit
def down(
    inner_nI,
    starts_E,
    downs,
    y_nD,
    intermediate,
    width,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The product of one expert's rows with its matrix down, for some outputs."""
    dtype: tl.constexpr = inner_nI.dtype.element_ty
    expert = tl.program_id(0)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first, stop = tl.load(starts_E + expert), tl.load(starts_E + expert + 1)
    rows = rows_of(downs + expert * 2 * BLOCKS, n, intermediate, BLOCKS, dtype)
    for row in range(first, stop, ROWS):
        r = row + tl.arange(0, ROWS)
        total = product(inner_nI, r, r < stop, rows, n < width, intermediate, ROWS, OUTPUTS, COLUMNS)
        at = r[:, None] * width + n[None, :]
        tl.store(y_nD + at, rounded(total, dtype), (r[:, None] < stop) & (n[None, :] < width))


@triton.jit
def combine(
    y_nD, rows_Tk, weights_Tk, residual_TD, out_TD, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):
    """The weighted sum of one token's experts by ascending expert, and the residual, rounded once."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row, weight = tl.load(rows_Tk + t * TOP_K + choice), tl.load(weights_Tk + t * TOP_K + choice)
        total += weight * tl.load(y_nD + row * width + d, d < width, 0.0).to(tl.float32)
    at = t * width + d
    total += tl.load(residual_TD + at, d < width, 0.0).to(tl.float32)
    tl.store(out_TD + at, rounded(total, out_TD.dtype.element_ty), d < width)
