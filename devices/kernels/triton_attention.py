"""The first half of a layer in Triton: projections with norm and rotation, attention over the KV cache.

Each docstring says what one program of a kernel computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import dot, group_of, normed, rounded, statistics, tile_of, two_products


@triton.jit
def norm(hidden_TD, norm_D, x_TD, width, eps, LAYER: tl.constexpr, WIDTH: tl.constexpr):
    """Normalise a token by its root mean square, or with LAYER by mean and variance; see `operators.norm`."""
    row = tl.program_id(0).to(tl.int64) * width
    mean, scale = statistics(hidden_TD + row, width, eps, LAYER, WIDTH)
    d = tl.arange(0, WIDTH)
    tl.store(x_TD + row + d, normed(hidden_TD + row, norm_D, d, width, mean, scale), d < width)


@triton.jit
def attention_inputs(
    x_TD,
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
    BLOCKS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    CLIPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute some pairs of entries of one head for some tokens: project, rotate queries and keys, store q, k or v.

    Rows i and i + d/2 of the head's matrix make a pair; with INTERLEAVED rows 2i and 2i + 1. See
    `operators.attention_inputs`.
    """
    dtype: tl.constexpr = x_TD.dtype.element_ty
    parts: tl.constexpr = (HALF + OUTPUTS - 1) // OUTPUTS
    tile, part = tile_of(tl.program_id(0), tl.cdiv(tokens, ROWS), (HEADS + 2 * KV_HEADS) * parts)
    t = tile * ROWS + tl.arange(0, ROWS)
    head = part // parts
    i = part % parts * OUTPUTS + tl.arange(0, OUTPUTS)
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    first = head * 2 * HALF + part % parts * OUTPUTS * step
    stop = (head + 1) * 2 * HALF
    low, high = two_products(
        x_TD,
        t,
        t < tokens,
        table,
        first,
        stop - apart,
        table,
        first + apart,
        stop,
        width,
        BLOCKS,
        BLOCKS,
        step,
        ROWS,
        OUTPUTS,
        COLUMNS,
    )
    there = i < HALF
    turns = head < HEADS + KV_HEADS
    if HEAD_NORM and turns:
        squares = tl.sum(low * low, 0) + tl.sum(high * high, 0)
        scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        weight_d = q_norm_d if head < HEADS else k_norm_d
        low = low * scale[None, :] * tl.load(weight_d + i * step, there, 0.0).to(tl.float32)[:, None]
        weight_d += apart
        high = high * scale[None, :] * tl.load(weight_d + i * step, there, 0.0).to(tl.float32)[:, None]
    if CLIPS:
        low, high = tl.clamp(low, -clip, clip), tl.clamp(high, -clip, clip)
    inside = (t[None, :] < tokens) & there[:, None]
    t = t.to(tl.int64)
    if turns:
        angle = t[None, :] * 2 * HALF + i[:, None]
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
    low_at, high_at = i, HALF + i
    if INTERLEAVED:  # values keep their order
        low_at, high_at = tl.where(turns, low_at, 2 * i), tl.where(turns, high_at, 2 * i + 1)
    tl.store(out[None, :] + low_at[:, None], rounded(low, dtype), inside)
    tl.store(out[None, :] + high_at[:, None], rounded(high, dtype), inside)


@triton.jit
def added(scores, value, peak, total, attended):
    """Add more tokens, by their scores and values, to the running softmax of some queries (peak, total, attended).

    Returns the three new results for each query: its largest score so far, the sum of exp(score - peak), and the sum of
    exp(score - peak) * value.
    """
    higher = tl.maximum(peak, tl.max(scores, 1))
    powers = tl.exp(scores - tl.where(higher == float("-inf"), 0.0, higher)[:, None])
    shrink = tl.exp(peak - tl.where(higher == float("-inf"), 0.0, higher))
    weighted = dot(rounded(powers, value.dtype), value, attended * shrink[:, None])
    return higher, total * shrink + tl.sum(powers, 1), weighted


@triton.jit
def cached(
    keys_NKd, values_NKd, blocks, token, wanted, head, block, i, KV_HEADS: tl.constexpr, HEAD: tl.constexpr
):
    """Load the keys and values of some tokens of a sequence, for one head; zeros for tokens that are not wanted.

    Args:
        blocks: pointer to the numbers of the sequence's blocks, of `block` tokens each.
        token: positions of the tokens in the sequence.
        wanted: mask of the tokens to load.
        i: indices of the elements of a head to load.
    """
    slot = tl.load(blocks + token // block, wanted, 0) * block + token % block
    at = (slot[:, None] * KV_HEADS + head) * HEAD + i[None, :]
    inside = wanted[:, None] & (i[None, :] < HEAD)
    return tl.load(keys_NKd + at, inside, 0.0), tl.load(values_NKd + at, inside, 0.0)


@triton.jit
def attend(
    q_SHd,
    k_SKd,
    v_SKd,
    table,
    keys_NKd,
    values_NKd,
    sums_SHP,
    peaks_SHP,
    parts_SHPd,
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
    """Attend from one new token over one part of its sequence, for the query heads that share a key-value head.

    Arguments are as for `operators.attend`. The program for the last part also stores the token's key and value in the
    KV cache. Parts begin at multiples of SPLIT, so that the bits of results depend on the sequence alone.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(table + sequence)
    blocks = table + 2 * sequences + tl.load(table + sequences + sequence)
    i = tl.arange(0, HEAD_TILE)
    g = tl.arange(0, GROUP_TILE)
    own = (sequence * KV_HEADS + head) * HEAD + i
    new_key = tl.load(k_SKd + own, i < HEAD, 0.0)
    new_value = tl.load(v_SKd + own, i < HEAD, 0.0)
    grouped = (g[:, None] < group) & (i[None, :] < HEAD)
    queries = tl.load(
        q_SHd + (sequence * HEADS + head * group + g[:, None]) * HEAD + i[None, :], grouped, 0.0
    )
    first = part * SPLIT
    stop = tl.minimum(length, first + SPLIT)
    if (stop == length) & (first < length):
        slot = tl.load(blocks + (length - 1) // BLOCK) * BLOCK + (length - 1) % BLOCK
        there = (slot * KV_HEADS + head) * HEAD + i
        tl.store(keys_NKd + there, new_key, i < HEAD)
        tl.store(values_NKd + there, new_value, i < HEAD)
    peak = tl.full((GROUP_TILE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_TILE,), dtype=tl.float32)
    attended = tl.zeros((GROUP_TILE, HEAD_TILE), dtype=tl.float32)
    for start in range(first, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        older = token < tl.minimum(stop, length - 1)
        key, value = cached(keys_NKd, values_NKd, blocks, token, older, head, BLOCK, i, KV_HEADS, HEAD)
        newest = (token == length - 1)[:, None]
        key = tl.where(newest, new_key[None, :], key)
        value = tl.where(newest, new_value[None, :], value)
        scores = dot(queries, tl.trans(key), tl.zeros((GROUP_TILE, TOKENS), dtype=tl.float32)) * scale
        seen = (token < stop) & (token >= length - window)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, total, attended = added(scores, value, peak, total, attended)
    place = (sequence * HEADS + head * group + g) * tl.num_programs(2) + part
    tl.store(sums_SHP + place, total, g < group)
    tl.store(peaks_SHP + place, peak, g < group)
    tl.store(parts_SHPd + place[:, None] * HEAD + i[None, :], attended, grouped)


@triton.jit
def attend_prompts(
    q_THd,
    starts_S,
    table,
    keys_NKd,
    values_NKd,
    out_TX,
    sequences,
    block,
    scale,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Attend from a tile of new tokens of one sequence, for one head, over the sequence's cached and new tokens.

    Arguments are as for `operators.attend_prompts`. Tiles of cached tokens begin at multiples of TOKENS; tokens that a
    query does not see add nothing to its result.
    """
    head = tl.program_id(0)
    sequence, row, stop = group_of(starts_S, tl.program_id(1), sequences, QUERIES, SEQUENCES)
    length = tl.load(table + sequence)
    blocks = table + 2 * sequences + tl.load(table + sequences + sequence)
    t = row + tl.arange(0, QUERIES)
    i = tl.arange(0, HEAD_TILE)
    position = length - stop + t
    wanted = (t[:, None] < stop) & (i[None, :] < HEAD)
    at = (t.to(tl.int64)[:, None] * HEADS + head) * HEAD + i[None, :]
    queries = tl.load(q_THd + at, wanted, 0.0)
    peak = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    attended = tl.zeros((QUERIES, HEAD_TILE), dtype=tl.float32)
    first = tl.maximum(length - stop + row - window + 1, 0) // TOKENS * TOKENS
    for start in range(first, tl.minimum(length - stop + row + QUERIES, length), TOKENS):
        token = start + tl.arange(0, TOKENS)
        kv_head = head // (HEADS // KV_HEADS)
        key, value = cached(
            keys_NKd, values_NKd, blocks, token, token < length, kv_head, block, i, KV_HEADS, HEAD
        )
        scores = dot(queries, tl.trans(key), tl.zeros((QUERIES, TOKENS), dtype=tl.float32)) * scale
        before = position[:, None] - token[None, :]
        scores = tl.where((before >= 0) & (before < window), scores, float("-inf"))
        peak, total, attended = added(scores, value, peak, total, attended)
    tl.store(out_TX + at, rounded(attended / total[:, None], out_TX.dtype.element_ty), wanted)


@triton.jit
def join_parts(
    sums_SHP,
    peaks_SHP,
    parts_SHPd,
    table,
    out_SX,
    most_parts,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Combine the results of `attend` for all parts of a sequence, for one head; see `operators.join_parts`."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HEAD_TILE)
    first = (sequence * HEADS + head) * most_parts
    total, peak = 0.0, float("-inf")
    attended = tl.zeros((HEAD_TILE,), dtype=tl.float32)
    for part in range(tl.cdiv(tl.load(table + sequence), SPLIT)):
        place = first + part
        own = tl.load(peaks_SHP + place)
        higher = tl.maximum(peak, own)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp(peak - base), tl.exp(own - base)
        total = total * kept + tl.load(sums_SHP + place) * added
        attended = attended * kept + tl.load(parts_SHPd + place * HEAD + i, i < HEAD, 0.0) * added
        peak = higher
    at = out_SX + (sequence * HEADS + head) * HEAD + i
    tl.store(at, rounded(attended / total, out_SX.dtype.element_ty), i < HEAD)
