"""The kernels of a layer in Triton: each program computes a tile of rows and outputs, in a fixed order of sums.

Tiles are chosen by the shapes of weights alone, so that a row's bits depend on no other row, and on no cut of a matrix
into pages. Shapes in names are those of `functions.py`. All tensors are contiguous.

A matrix of N rows may be in several row blocks. A table of int64 has the first row and the address of each, and the
kernels find a row's block in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW_TILE = 16
"""Rows of a tile: the fewest that tensor cores take."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""True if Triton's interpreter runs the kernels, on the CPU."""


@triton.jit
def _dot(a, b, total):
    """The total plus a product (M, K) by (K, N), without the rounding of tensor cores in float32."""
    if INTERPRETED:  # numpy's product has another order of sums for each row of a tile
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Float32 rounded to the nearest number of a type; of two to the even one."""
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _rows_of(table, n, columns, BLOCKS: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to some rows of a matrix in row blocks."""
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = tl.load(table + 1) + n.to(tl.int64) * columns * size
    for block in tl.static_range(1, BLOCKS):
        first = tl.load(table + 2 * block)
        own = tl.load(table + 2 * block + 1) + (n - first).to(tl.int64) * columns * size
        address = tl.where(n >= first, own, address)
    return tl.multiple_of(address, 16).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def _statistics(x_TD, t, tokens, width, eps, LAYER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
def _normed(x_TD, norm_D, t, d, inside, width, mean, scale):
    """A tile of normalised rows, float32."""
    x = tl.load(x_TD + t[:, None] * width + d[None, :], inside, 0.0).to(tl.float32)
    weight = tl.load(norm_D + d, d < width, 0.0).to(tl.float32)
    return (x - mean[:, None]) * scale[:, None] * weight[None, :]


@triton.jit
def attention_inputs(
    hidden_TD,
    norm_D,
    table,
    cosines_Td,
    sines_Td,
    q_norm_d,
    k_norm_d,
    q_THd,
    k_TKd,
    v_TKd,
    tokens,
    width,
    eps,
    clip,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LAYER: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    CLIPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Norm, projection and rotation of some pairs (i, i + d/2) of one head."""
    dtype: tl.constexpr = hidden_TD.dtype.element_ty
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    i = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    there = i < HALF
    first = _rows_of(table, head * 2 * HALF + i, width, BLOCKS, dtype)
    second = _rows_of(table, head * 2 * HALF + HALF + i, width, BLOCKS, dtype)
    mean, scale = _statistics(hidden_TD, t, tokens, width, eps, LAYER, ROWS, COLUMNS)
    low = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    high = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = (t[:, None] < tokens) & (d[None, :] < width)
        x = _rounded(_normed(hidden_TD, norm_D, t, d, inside, width, mean, scale), dtype)
        weights = there[:, None] & (d[None, :] < width)
        low = _dot(x, tl.trans(tl.load(first[:, None] + d[None, :], weights, 0.0)), low)
        high = _dot(x, tl.trans(tl.load(second[:, None] + d[None, :], weights, 0.0)), high)
    turns = head < HEADS + KV_HEADS
    if HEAD_NORM and turns:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        weight_d = q_norm_d if head < HEADS else k_norm_d
        low = low * scale[:, None] * tl.load(weight_d + i, there, 0.0).to(tl.float32)[None, :]
        high = high * scale[:, None] * tl.load(weight_d + HALF + i, there, 0.0).to(tl.float32)[None, :]
    if CLIPS:
        low, high = tl.clamp(low, -clip, clip), tl.clamp(high, -clip, clip)
    inside = (t[:, None] < tokens) & there[None, :]
    if turns:
        angle = t[:, None] * 2 * HALF + i[None, :]
        turned = low * tl.load(cosines_Td + angle, inside, 0.0) + high * tl.load(
            sines_Td + angle, inside, 0.0
        )
        angle += HALF
        high = high * tl.load(cosines_Td + angle, inside, 0.0) + low * tl.load(sines_Td + angle, inside, 0.0)
        low = turned
    if head < HEADS:
        out = q_THd + (t * HEADS + head) * 2 * HALF
    elif turns:
        out = k_TKd + (t * KV_HEADS + head - HEADS) * 2 * HALF
    else:
        out = v_TKd + (t * KV_HEADS + head - HEADS - KV_HEADS) * 2 * HALF
    tl.store(out[:, None] + i[None, :], _rounded(low, dtype), inside)
    tl.store(out[:, None] + HALF + i[None, :], _rounded(high, dtype), inside)


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
    rows = _rows_of(table, n, inputs, BLOCKS, dtype)
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, inputs, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        x = tl.load(
            x_TX + t[:, None] * inputs + d[None, :], (t[:, None] < tokens) & (d[None, :] < inputs), 0.0
        )
        weights = tl.load(rows[:, None] + d[None, :], (n[:, None] < width) & (d[None, :] < inputs), 0.0)
        total = _dot(x, tl.trans(weights), total)
    inside = (t[:, None] < tokens) & (n[None, :] < width)
    at = t[:, None] * width + n[None, :]
    tl.store(
        out_TD + at, _rounded(total + tl.load(residual_TD + at, inside, 0.0).to(tl.float32), dtype), inside
    )


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
    rows = _rows_of(table, e, width, BLOCKS, dtype)
    mean, scale = _statistics(hidden_TD, t, tokens, width, eps, LAYER, ROWS, COLUMNS)
    logits = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, width, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = (t[:, None] < tokens) & (d[None, :] < width)
        x = _rounded(_normed(hidden_TD, norm_D, t, d, inside, width, mean, scale), dtype)
        tl.store(x_TD + t[:, None] * width + d[None, :], x, inside)
        weights = tl.load(rows[:, None] + d[None, :], (e[:, None] < EXPERTS) & (d[None, :] < width), 0.0)
        logits = _dot(x.to(tl.float32), tl.trans(weights).to(tl.float32), logits)
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
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """silu(gate x) * up x of one expert's rows, for some of its outputs."""
    dtype: tl.constexpr = x_TD.dtype.element_ty
    expert = tl.program_id(0)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first, stop = tl.load(starts_E + expert), tl.load(starts_E + expert + 1)
    gate = _rows_of(gates + expert * 2 * BLOCKS, n, width, BLOCKS, dtype)
    up = _rows_of(ups + expert * 2 * BLOCKS, n, width, BLOCKS, dtype)
    for row in range(first, stop, ROWS):
        r = row + tl.arange(0, ROWS)
        t = tl.load(pairs_n + r, r < stop, 0) // TOP_K if GATHERS else r
        gated = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        upped = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for start in range(0, width, COLUMNS):
            d = start + tl.arange(0, COLUMNS)
            x = tl.load(
                x_TD + t[:, None] * width + d[None, :], (r[:, None] < stop) & (d[None, :] < width), 0.0
            )
            inside = (n[:, None] < intermediate) & (d[None, :] < width)
            gated = _dot(x, tl.trans(tl.load(gate[:, None] + d[None, :], inside, 0.0)), gated)
            upped = _dot(x, tl.trans(tl.load(up[:, None] + d[None, :], inside, 0.0)), upped)
        inner = gated / (1.0 + tl.exp(-gated)) * upped
        at = r[:, None] * intermediate + n[None, :]
        tl.store(inner_nI + at, _rounded(inner, dtype), (r[:, None] < stop) & (n[None, :] < intermediate))


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
    rows = _rows_of(downs + expert * 2 * BLOCKS, n, intermediate, BLOCKS, dtype)
    for row in range(first, stop, ROWS):
        r = row + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for start in range(0, intermediate, COLUMNS):
            d = start + tl.arange(0, COLUMNS)
            x = tl.load(
                inner_nI + r[:, None] * intermediate + d[None, :],
                (r[:, None] < stop) & (d[None, :] < intermediate),
                0.0,
            )
            inside = (n[:, None] < width) & (d[None, :] < intermediate)
            total = _dot(x, tl.trans(tl.load(rows[:, None] + d[None, :], inside, 0.0)), total)
        at = r[:, None] * width + n[None, :]
        tl.store(y_nD + at, _rounded(total, dtype), (r[:, None] < stop) & (n[None, :] < width))


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
    tl.store(out_TD + at, _rounded(total, out_TD.dtype.element_ty), d < width)


@triton.jit
def attend(
    q_SHd,
    k_SKd,
    v_SKd,
    keys,
    values,
    table,
    sums,
    peaks,
    parts,
    sequences,
    scale,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Attention of one new token over a part of its sequence, for the heads that share a key; stores key and value.

    The table has the tokens of each sequence, the place of its first block in the list of blocks, and that list. Parts
    begin at multiples of SPLIT, so that their bits depend on the sequence alone.
    """
    dtype: tl.constexpr = q_SHd.dtype.element_ty
    group: tl.constexpr = HEADS // KV_HEADS
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(table + sequence)
    blocks = table + 2 * sequences + tl.load(table + sequences + sequence)
    i = tl.arange(0, HEAD_TILE)
    g = tl.arange(0, GROUP_TILE)
    own = (sequence * KV_HEADS + head) * HEAD + i
    new_key = tl.load(k_SKd + own, i < HEAD, 0.0)
    new_value = tl.load(v_SKd + own, i < HEAD, 0.0)
    keys = keys.to(tl.pointer_type(dtype), bitcast=True)
    values = values.to(tl.pointer_type(dtype), bitcast=True)
    grouped = (g[:, None] < group) & (i[None, :] < HEAD)
    queries = tl.load(
        q_SHd + (sequence * HEADS + head * group + g[:, None]) * HEAD + i[None, :], grouped, 0.0
    )
    first = part * SPLIT
    stop = tl.minimum(length, first + SPLIT)
    if (stop == length) & (first < length):
        slot = tl.load(blocks + (length - 1) // BLOCK) * BLOCK + (length - 1) % BLOCK
        there = (slot * KV_HEADS + head) * HEAD + i
        tl.store(keys + there, new_key, i < HEAD)
        tl.store(values + there, new_value, i < HEAD)
    peak = tl.full((GROUP_TILE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_TILE,), dtype=tl.float32)
    attended = tl.zeros((GROUP_TILE, HEAD_TILE), dtype=tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        cached = token < tl.minimum(stop, length - 1)
        slot = tl.load(blocks + token // BLOCK, cached, 0) * BLOCK + token % BLOCK
        at = (slot[:, None] * KV_HEADS + head) * HEAD + i[None, :]
        inside = cached[:, None] & (i[None, :] < HEAD)
        newest = (token == length - 1)[:, None]
        key = tl.where(newest, new_key[None, :], tl.load(keys + at, inside, 0.0))
        value = tl.where(newest, new_value[None, :], tl.load(values + at, inside, 0.0))
        scores = _dot(queries, tl.trans(key), tl.zeros((GROUP_TILE, TOKENS), dtype=tl.float32)) * scale
        seen = (token < stop) & (token >= length - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        powers = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(powers, 1)
        attended = _dot(_rounded(powers, dtype), value, attended * shrink[:, None])
        peak = higher
    place = (sequence * KV_HEADS + head) * tl.num_programs(2) + part
    tl.store(sums + place * GROUP_TILE + g, total)
    tl.store(peaks + place * GROUP_TILE + g, peak)
    tl.store(parts + (place * GROUP_TILE + g[:, None]) * HEAD_TILE + i[None, :], attended)


@triton.jit
def join_parts(
    sums,
    peaks,
    parts,
    table,
    out_SX,
    most_parts,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The attention of one head over all parts of a sequence, added in their order."""
    group: tl.constexpr = HEADS // KV_HEADS
    sequence, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, HEAD_TILE)
    first = (sequence * KV_HEADS + head // group) * most_parts
    total, peak = 0.0, float("-inf")
    attended = tl.zeros((HEAD_TILE,), dtype=tl.float32)
    for part in range(tl.cdiv(tl.load(table + sequence), SPLIT)):
        place = (first + part) * GROUP_TILE + head % group
        own = tl.load(peaks + place)
        higher = tl.maximum(peak, own)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp(peak - base), tl.exp(own - base)
        total = total * kept + tl.load(sums + place) * added
        attended = attended * kept + tl.load(parts + place * HEAD_TILE + i) * added
        peak = higher
    at = out_SX + (sequence * HEADS + head) * HEAD + i
    tl.store(at, _rounded(attended / total, out_SX.dtype.element_ty), i < HEAD)
