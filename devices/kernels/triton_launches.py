"""The operators of a step on a GPU: each launches its kernel in Triton, and does not wait for it.

The operators' arguments are explained in `operators.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from . import triton_attention as attention
from . import triton_ends as ends
from . import triton_experts as experts
from .operators import QUERIES, on_gpu
from .triton_sizes import Tile, tile_for

Tensor = torch.Tensor

TOKENS = 64
"""Cached tokens that a program of attention reads at once."""
LEAST_HEADS = 16
"""Fewest heads in a tile: tensor cores take no fewer."""
PAIRS, READ = 128, 1024
"""Pairs of token and expert that a program sorts, and pairs that it counts at once."""
COPIED_AT_ONCE = 1024
"""Numbers of a row that a program copies, adds or reads at once."""
ROUTED_AT_ONCE = 8192
"""Weights of a router that a program reads at once."""


@on_gpu
def embed(
    ids_T: Tensor,
    positions_T: Tensor,
    embedding_VD: Tensor,
    frequencies_h: Tensor,
    hidden_TD: Tensor,
    cosines_T1d: Tensor,
    sines_T1d: Tensor,
) -> None:
    """Launch the kernel that looks up embeddings and angles of tokens; arguments as for `operators.embed`."""
    tokens, width = hidden_TD.shape
    half = len(frequencies_h)
    ends.embed[tokens, triton.cdiv(width, COPIED_AT_ONCE)](
        ids_T,
        positions_T,
        embedding_VD,
        frequencies_h,
        hidden_TD,
        cosines_T1d,
        sines_T1d,
        width,
        HALF=half,
        HALF_TILE=triton.next_power_of_2(half),
        COLUMNS=COPIED_AT_ONCE,
    )


@on_gpu
def norm(hidden_TD: Tensor, norm_D: Tensor, eps: float, layer_norm: bool, x_TD: Tensor) -> None:
    """Launch the kernel that normalises tokens; arguments as for `operators.norm`."""
    tokens, width = hidden_TD.shape
    attention.norm[(tokens,)](
        hidden_TD, norm_D, x_TD, width, eps, LAYER=layer_norm, WIDTH=triton.next_power_of_2(width)
    )


@on_gpu
def attention_inputs(
    x_TD: Tensor,
    table: Tensor,
    blocks: list[Tensor],
    head_norms: list[Tensor],
    cosines_T1d: Tensor,
    sines_T1d: Tensor,
    eps: float,
    interleaved: bool,
    clip: float | None,
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
) -> None:
    """Launch the kernel that makes queries, keys and values; arguments as for `operators.attention_inputs`."""
    tokens, width = x_TD.shape
    heads, kv_heads, half = q_THd.shape[1], k_TKd.shape[1], q_THd.shape[2] // 2
    tile = tile_for("attention_inputs", tokens, x_TD.dtype)
    if head_norms:
        tile = tile._replace(outputs=max(triton.next_power_of_2(half), 16))
    parts = (heads + 2 * kv_heads) * triton.cdiv(half, tile.outputs)
    attention.attention_inputs[(triton.cdiv(tokens, tile.rows) * parts,)](
        x_TD,
        table,
        cosines_T1d,
        sines_T1d,
        *(head_norms or (x_TD, x_TD)),
        q_THd,
        k_TKd,
        v_TKd,
        tokens,
        width,
        eps,
        clip or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        BLOCKS=table.shape[1],
        INTERLEAVED=interleaved,
        HEAD_NORM=bool(head_norms),
        CLIPS=clip is not None,
        **tile.launch,
    )


@on_gpu
def attend(
    q_SHd: Tensor,
    k_SKd: Tensor,
    v_SKd: Tensor,
    table: Tensor,
    block: int,
    window: int,
    split: int,
    keys_NKd: Tensor,
    values_NKd: Tensor,
    sums_SHP: Tensor,
    peaks_SHP: Tensor,
    parts_SHPd: Tensor,
) -> None:
    """Launch the kernel that attends in a decode step over parts of sequences; arguments as for `operators.attend`."""
    (sequences, heads, head_dim), kv_heads = q_SHd.shape, k_SKd.shape[1]
    attention.attend[sequences, kv_heads, sums_SHP.shape[2]](
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
        head_dim**-0.5,
        window,
        KV_HEADS=kv_heads,
        GROUP_TILE=triton.next_power_of_2(max(heads // kv_heads, LEAST_HEADS)),
        BLOCK=block,
        TOKENS=TOKENS,
        **_heads(heads, head_dim, split),
    )


@on_gpu
def attend_prompts(
    q_THd: Tensor,
    starts_S: Tensor,
    tiles: int,
    table: Tensor,
    block: int,
    window: int,
    keys_NKd: Tensor,
    values_NKd: Tensor,
    out_TX: Tensor,
) -> None:
    """Launch the kernel that attends from all new tokens of prompts; arguments as for `operators.attend_prompts`."""
    heads, head_dim = q_THd.shape[1:]
    sequences = len(starts_S) - 1
    attention.attend_prompts[heads, tiles](
        q_THd,
        starts_S,
        table,
        keys_NKd,
        values_NKd,
        out_TX,
        sequences,
        block,
        head_dim**-0.5,
        window,
        HEADS=heads,
        KV_HEADS=keys_NKd.shape[1],
        HEAD=head_dim,
        HEAD_TILE=triton.next_power_of_2(max(head_dim, 16)),
        SEQUENCES=triton.next_power_of_2(sequences),
        QUERIES=QUERIES,
        TOKENS=TOKENS,
    )


@on_gpu
def join_parts(
    sums_SHP: Tensor, peaks_SHP: Tensor, parts_SHPd: Tensor, table: Tensor, split: int, out_SX: Tensor
) -> None:
    """Launch the kernel that combines the parts of each sequence; arguments as for `operators.join_parts`."""
    sequences, heads, most_parts, head_dim = parts_SHPd.shape
    attention.join_parts[sequences, heads](
        sums_SHP, peaks_SHP, parts_SHPd, table, out_SX, most_parts, **_heads(heads, head_dim, split)
    )


@on_gpu
def output_projection(
    x_TX: Tensor, table: Tensor, blocks: list[Tensor], residual_TD: Tensor, out_TD: Tensor
) -> None:
    """Launch the kernel that projects attention's output; arguments as for `operators.output_projection`."""
    tokens, width = out_TD.shape
    tile = tile_for("output_projection", tokens, x_TX.dtype)
    experts.output_projection[(_programs(tile, tokens, width),)](
        x_TX,
        table,
        residual_TD,
        out_TD,
        tokens,
        x_TX.shape[1],
        width,
        BLOCKS=table.shape[1],
        **tile.launch,
    )


@on_gpu
def route(
    hidden_TD: Tensor,
    norm_D: Tensor,
    table: Tensor,
    blocks: list[Tensor],
    eps: float,
    layer_norm: bool,
    sum_to_one: bool,
    x_TD: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    logits_TE: Tensor,
) -> None:
    """Launch the kernel that chooses each token's experts; arguments as for `operators.route`."""
    tokens, width = hidden_TD.shape
    count = logits_TE.shape[1]
    outputs = triton.next_power_of_2(count)
    experts.route[(tokens,)](
        hidden_TD,
        norm_D,
        table,
        x_TD,
        experts_Tk,
        weights_Tk,
        logits_TE,
        width,
        eps,
        EXPERTS=count,
        TOP_K=experts_Tk.shape[1],
        BLOCKS=table.shape[1],
        LAYER=layer_norm,
        SUM_TO_ONE=sum_to_one,
        WIDTH=triton.next_power_of_2(width),
        OUTPUTS=outputs,
        COLUMNS=min(COPIED_AT_ONCE, max(ROUTED_AT_ONCE // outputs, 16)),
        num_warps=8,
    )


@on_gpu
def sort_rows(experts_Tk: Tensor, rows_Tk: Tensor, pairs_n: Tensor, starts_E: Tensor) -> None:
    """Launch the kernel that sorts pairs of token and expert; arguments as for `operators.sort_rows`."""
    experts.sort_rows[(triton.cdiv(len(pairs_n), PAIRS),)](
        experts_Tk,
        rows_Tk,
        pairs_n,
        starts_E,
        len(pairs_n),
        len(starts_E) - 1,
        PAIRS=PAIRS,
        READ=READ,
        EXPERTS=triton.next_power_of_2(len(starts_E)),
    )


@on_gpu
def gate_and_up(
    x_TD: Tensor,
    pairs_n: Tensor | None,
    starts_E: Tensor,
    gate_table: Tensor,
    gates: list[Tensor],
    up_table: Tensor,
    ups: list[Tensor],
    inner_nI: Tensor,
    gated_nI: Tensor | None,
) -> None:
    """Launch the kernel that computes silu(gate x) * up x by expert; arguments as for `operators.gate_and_up`."""
    rows, intermediate = inner_nI.shape
    tile, tiles, sizes = _experts("gate_and_up", inner_nI, starts_E)
    experts.gate_and_up[(tiles * triton.cdiv(intermediate, tile.outputs),)](
        x_TD,
        starts_E if pairs_n is None else pairs_n,
        starts_E,
        gate_table,
        up_table,
        inner_nI,
        inner_nI if gated_nI is None else gated_nI,
        tiles,
        len(starts_E) - 1,
        x_TD.shape[1],
        intermediate,
        TOP_K=rows // len(x_TD),
        GATHERS=pairs_n is not None,
        OBSERVED=gated_nI is not None,
        GATE_BLOCKS=gate_table.shape[1],
        UP_BLOCKS=up_table.shape[1],
        **sizes,
    )


@on_gpu
def down(inner_nI: Tensor, starts_E: Tensor, table: Tensor, blocks: list[Tensor], y_nD: Tensor) -> None:
    """Launch the kernel that multiplies experts' rows by matrix down; arguments as for `operators.down`."""
    width = y_nD.shape[1]
    tile, tiles, sizes = _experts("down", inner_nI, starts_E)
    experts.down[(tiles * triton.cdiv(width, tile.outputs),)](
        inner_nI,
        starts_E,
        table,
        y_nD,
        tiles,
        len(starts_E) - 1,
        inner_nI.shape[1],
        width,
        BLOCKS=table.shape[1],
        **sizes,
    )


@on_gpu
def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor, out_TD: Tensor) -> None:
    """Launch the kernel that adds expert outputs and residual; arguments as for `operators.combine`."""
    tokens, width = out_TD.shape
    experts.combine[tokens, triton.cdiv(width, COPIED_AT_ONCE)](
        y_nD,
        rows_Tk,
        weights_Tk,
        residual_TD,
        out_TD,
        width,
        TOP_K=rows_Tk.shape[1],
        COLUMNS=COPIED_AT_ONCE,
    )


@on_gpu
def logits(x_SD: Tensor, table: Tensor, blocks: list[Tensor], logits_SV: Tensor) -> None:
    """Launch the kernel that multiplies rows by the LM head; arguments as for `operators.logits`."""
    sequences, vocabulary = logits_SV.shape
    tile = tile_for("logits", sequences, x_SD.dtype)
    ends.logits[(_programs(tile, sequences, vocabulary),)](
        x_SD,
        table,
        logits_SV,
        sequences,
        x_SD.shape[1],
        vocabulary,
        BLOCKS=table.shape[1],
        **tile.launch,
    )


@on_gpu
def likeliest(logits_SV: Tensor, tokens_S: Tensor) -> None:
    """Launch the kernel that finds each row's likeliest token; arguments as for `operators.likeliest`."""
    sequences, vocabulary = logits_SV.shape
    ends.likeliest[(sequences,)](logits_SV, tokens_S, vocabulary, COLUMNS=COPIED_AT_ONCE)


def _programs(tile: Tile, rows: int, outputs: int) -> int:
    """Return the number of Triton programs that a product of `rows` rows of x by `outputs` rows of a matrix needs."""
    return -(-rows // tile.rows) * -(-outputs // tile.outputs)


def _experts(product: str, inner_nI: Tensor, starts_E: Tensor) -> tuple[Tile, int, dict[str, Any]]:
    """Choose the tile for a product of all experts' rows; returns it, the number of tiles, and the launch's arguments.

    The host does not know the number of rows of each expert. So the tile has room for twice the mean number, and the
    number of tiles is enough for any division of the rows among the experts.

    product: name of the product, a key of `TILES`.
    """
    rows, count = len(inner_nI), len(starts_E) - 1
    tile = tile_for(product, min(rows, -(-2 * rows // count)), inner_nI.dtype)
    hit = min(rows, count)
    tiles = hit + (rows - hit) // tile.rows
    return tile, tiles, {"EXPERTS": triton.next_power_of_2(count), **tile.launch}


def _heads(heads: int, head_dim: int, split: int) -> dict[str, Any]:
    """Return the compile-time arguments that the kernels of decode attention have in common.

    split: number of tokens in a part of a sequence.
    """
    tile = triton.next_power_of_2(max(head_dim, 16))
    return {"HEADS": heads, "HEAD": head_dim, "HEAD_TILE": tile, "SPLIT": split}
