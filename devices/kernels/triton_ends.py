"""The ends of a step in Triton: embeddings and angles before the layers, logits and the likeliest tokens after them.

Each docstring says what one program of a kernel computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import product, rounded, tile_of


@triton.jit
def embed(
    ids_T,
    positions_T,
    embedding_VD,
    frequencies_h,
    hidden_TD,
    cosines_Td,
    sines_Td,
    width,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy some columns of a token's embedding; a token's first program also computes its rotary cosines and sines."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(embedding_VD + tl.load(ids_T + t) * width + d, d < width)
    tl.store(hidden_TD + t * width + d, row, d < width)
    if tl.program_id(1) == 0:
        i = tl.arange(0, HALF_TILE)
        angle = tl.load(positions_T + t).to(tl.float32) * tl.load(frequencies_h + i, i < HALF, 0.0)
        cosine, sine = tl.cos(angle), tl.sin(angle)
        at = t * 2 * HALF + i
        tl.store(cosines_Td + at, cosine, i < HALF)
        tl.store(cosines_Td + at + HALF, cosine, i < HALF)
        tl.store(sines_Td + at, -sine, i < HALF)
        tl.store(sines_Td + at + HALF, sine, i < HALF)


@triton.jit
def logits(
    x_SD,
    table,
    logits_SV,
    sequences,
    width,
    vocabulary,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the logits of a tile of rows of x for a tile of the vocabulary; see `operators.logits`."""
    tile, part = tile_of(tl.program_id(0), tl.cdiv(sequences, ROWS), tl.cdiv(vocabulary, OUTPUTS))
    s = tile * ROWS + tl.arange(0, ROWS)
    v = part * OUTPUTS + tl.arange(0, OUTPUTS)
    total = product(
        x_SD, s, s < sequences, table, part * OUTPUTS, vocabulary, width, BLOCKS, ROWS, OUTPUTS, COLUMNS
    )
    at = s.to(tl.int64)[None, :] * vocabulary + v[:, None]
    inside = (s[None, :] < sequences) & (v[:, None] < vocabulary)
    tl.store(logits_SV + at, rounded(total, x_SD.dtype.element_ty).to(tl.float32), inside)


@triton.jit
def likeliest(logits_SV, tokens_S, vocabulary, COLUMNS: tl.constexpr):
    """Find the likeliest token of one row, the first of equal ones; -1 if a logit is NaN or the largest not finite."""
    s = tl.program_id(0).to(tl.int64)
    largest = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    first = tl.full((COLUMNS,), 0, dtype=tl.int32)
    bad = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in range(0, vocabulary, COLUMNS):
        v = start + tl.arange(0, COLUMNS)
        logit = tl.load(logits_SV + s * vocabulary + v, v < vocabulary, float("-inf"))
        bad += (logit != logit).to(tl.int32)
        first = tl.where(logit > largest, v, first)
        largest = tl.where(logit > largest, logit, largest)
    highest = tl.max(largest, 0)
    token = tl.min(tl.where(largest == highest, first, vocabulary), 0)
    finite = (tl.sum(bad, 0) == 0) & (highest > float("-inf")) & (highest < float("inf"))
    tl.store(tokens_S + s, tl.where(finite, token, -1).to(tl.int64))
