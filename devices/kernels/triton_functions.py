"""The operations of a layer by kernels of Triton: they launch them, and wait for nothing.

A matrix is given as its row blocks and their table, as `table_of` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton

from . import triton_code as code
from .seam import Routed

Tensor = torch.Tensor
Blocks = Sequence[Tensor]

COLUMNS = 128
"""Inputs that a program reads at once."""
OUTPUTS = 32
"""Outputs of a program. More programs than this keep more of a GPU's processors busy with one row."""
PAIRS = 16
"""Pairs of a head's entries that a program computes."""
SPLIT = 512
"""Tokens of a part of a sequence, each of which a program attends over."""
TOKENS = 64
"""Tokens of the cache that a program reads at once."""
SORTED_AT_ONCE = 128
COMBINED_AT_ONCE = 1024


class Matrix(NamedTuple):
    """A matrix, or one of each expert, in row blocks.

    Attributes:
        table: the first row and the address of each block (matrices, blocks, 2), int64, on the GPU.
        blocks: the number of blocks of each matrix.
        held: the blocks, which must live as long.
    """

    table: Tensor
    blocks: int
    held: Sequence[Blocks]


def table_of(matrices: Sequence[Blocks], indices: Callable[[Sequence[int]], Tensor]) -> Matrix:
    """Describe matrices for the kernels. indices: makes an int64 tensor on the GPU of numbers."""
    most = max(map(len, matrices))
    numbers: list[int] = []
    for blocks in matrices:
        first = 0
        for block in blocks:
            numbers += first, block.data_ptr()
            first += len(block)
        numbers += [first, blocks[-1].data_ptr()] * (most - len(blocks))
    return Matrix(indices(numbers), most, matrices)


def attention_inputs(
    hidden_TD: Tensor,
    angles: tuple[Tensor, Tensor],
    *,
    norm_D: Tensor,
    matrix: Matrix,
    head_norms: tuple[Tensor, Tensor] | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    clip: float | None,
    layer_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `functions.project_qkv`, in one launch."""
    tokens, width = hidden_TD.shape
    half = head_dim // 2
    pairs = triton.next_power_of_2(max(half, PAIRS)) if head_norms else PAIRS
    q_THd, k_TKd, v_TKd = (
        hidden_TD.new_empty(tokens, each, head_dim) for each in (heads, kv_heads, kv_heads)
    )
    grid = _tiles(tokens), heads + 2 * kv_heads, triton.cdiv(half, pairs)
    q_norm_d, k_norm_d = head_norms or (norm_D, norm_D)
    code.attention_inputs[grid](
        hidden_TD,
        norm_D,
        matrix.table,
        *angles,
        q_norm_d,
        k_norm_d,
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
        PAIRS=pairs,
        BLOCKS=matrix.blocks,
        LAYER=layer_norm,
        HEAD_NORM=head_norms is not None,
        CLIPS=clip is not None,
        ROWS=code.ROW_TILE,
        COLUMNS=COLUMNS,
    )
    return q_THd, k_TKd, v_TKd


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    keys: int,
    values: int,
    table: Tensor,
    *,
    longest: int,
    block: int,
    window: int,
) -> Tensor:
    """Store one new token's keys and values for each sequence, and attend over the cache: (S, H * d); two launches.

    Args:
        keys, values: addresses of a layer's cache, in blocks.
        table: as for the kernel.
        longest: tokens of the longest sequence.
        block: tokens of a block.
        window: tokens that a query sees.
    """
    q_SHd, k_SKd, v_SKd = qkv
    (sequences, heads, head_dim), kv_heads = q_SHd.shape, k_SKd.shape[1]
    most_parts = triton.cdiv(longest, SPLIT)
    sizes = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD": head_dim,
        "HEAD_TILE": triton.next_power_of_2(max(head_dim, 16)),
        "GROUP_TILE": triton.next_power_of_2(max(heads // kv_heads, code.ROW_TILE)),
        "SPLIT": SPLIT,
    }
    places = sequences * kv_heads * most_parts * sizes["GROUP_TILE"]
    sums, peaks, parts = (
        torch.empty(places * each, dtype=torch.float32, device=q_SHd.device)
        for each in (1, 1, sizes["HEAD_TILE"])
    )
    code.attend[sequences, kv_heads, most_parts](
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
        head_dim**-0.5,
        window,
        BLOCK=block,
        TOKENS=TOKENS,
        **sizes,
    )
    out_SX = q_SHd.new_empty(sequences, heads * head_dim)
    code.join_parts[sequences, heads](sums, peaks, parts, table, out_SX, most_parts, **sizes)
    return out_SX


def output_projection(x_TX: Tensor, residual_TD: Tensor, matrix: Matrix) -> Tensor:
    """The product with a matrix (D, X), and the residual."""
    tokens, width = residual_TD.shape
    out_TD = torch.empty_like(residual_TD)
    code.output_projection[_tiles(tokens), triton.cdiv(width, OUTPUTS)](
        x_TX,
        matrix.table,
        residual_TD,
        out_TD,
        tokens,
        x_TX.shape[1],
        width,
        **_tile(matrix),
    )
    return out_TD


def route(
    hidden_TD: Tensor,
    *,
    norm_D: Tensor,
    matrix: Matrix,
    experts: int,
    top_k: int,
    eps: float,
    layer_norm: bool,
    sum_to_one: bool,
) -> Routed:
    """Norm, router, and the choice of experts, in one launch."""
    tokens, width = hidden_TD.shape
    x_TD = torch.empty_like(hidden_TD)
    logits_TE = hidden_TD.new_empty(tokens, experts, dtype=torch.float32)
    weights_Tk = logits_TE.new_empty(tokens, top_k)
    experts_Tk = torch.empty_like(weights_Tk, dtype=torch.int64)
    code.route[(_tiles(tokens),)](
        hidden_TD,
        norm_D,
        matrix.table,
        x_TD,
        experts_Tk,
        weights_Tk,
        logits_TE,
        tokens,
        width,
        eps,
        EXPERTS=experts,
        TOP_K=top_k,
        BLOCKS=matrix.blocks,
        LAYER=layer_norm,
        SUM_TO_ONE=sum_to_one,
        ROWS=code.ROW_TILE,
        OUTPUTS=triton.next_power_of_2(max(experts, 16)),
        COLUMNS=COLUMNS,
    )
    return Routed(x_TD, experts_Tk, weights_Tk, logits_TE)


class Order(NamedTuple):
    """The rows of all experts, by expert and then by token.

    Attributes:
        rows_Tk: the row of each pair of token and expert.
        pairs_n: the pair of each row; None where the rows are those of the input.
        starts_E: the first row of each expert, and the number of rows.
    """

    rows_Tk: Tensor | None
    pairs_n: Tensor | None
    starts_E: Tensor


def sort_rows(experts_Tk: Tensor, experts: int) -> Order:
    """Order the rows of chosen experts, in one launch and without a look at the host."""
    rows_Tk = torch.empty_like(experts_Tk)
    pairs_n = torch.empty(experts_Tk.numel(), dtype=torch.int32, device=experts_Tk.device)
    starts_E = experts_Tk.new_empty(experts + 1)
    code.sort_rows[(1,)](
        experts_Tk,
        rows_Tk,
        pairs_n,
        starts_E,
        experts_Tk.numel(),
        experts,
        PAIRS=SORTED_AT_ONCE,
        EXPERTS=triton.next_power_of_2(experts + 1),
    )
    return Order(rows_Tk, pairs_n, starts_E)


def run_experts(
    x_TD: Tensor,
    order: Order,
    y_nD: Tensor,
    *,
    gates: Matrix,
    ups: Matrix,
    downs: Matrix,
    intermediate: int,
    top_k: int = 1,
) -> None:
    """Run experts on their rows, in two launches."""
    width, experts = x_TD.shape[1], len(order.starts_E) - 1
    inner_nI = x_TD.new_empty(len(y_nD), intermediate)
    code.gate_and_up[experts, triton.cdiv(intermediate, OUTPUTS)](
        x_TD,
        order.starts_E if order.pairs_n is None else order.pairs_n,
        order.starts_E,
        gates.table,
        ups.table,
        inner_nI,
        width,
        intermediate,
        TOP_K=top_k,
        GATHERS=order.pairs_n is not None,
        **_tile(gates),
    )
    code.down[experts, triton.cdiv(width, OUTPUTS)](
        inner_nI,
        order.starts_E,
        downs.table,
        y_nD,
        intermediate,
        width,
        **_tile(downs),
    )


def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
    """As `functions.combine`, in one launch."""
    tokens, width = residual_TD.shape
    out_TD = torch.empty_like(residual_TD)
    code.combine[tokens, triton.cdiv(width, COMBINED_AT_ONCE)](
        y_nD,
        rows_Tk,
        weights_Tk,
        residual_TD,
        out_TD,
        width,
        TOP_K=rows_Tk.shape[1],
        COLUMNS=COMBINED_AT_ONCE,
    )
    return out_TD


def _tiles(rows: int) -> int:
    return -(-rows // code.ROW_TILE)


def _tile(matrix: Matrix) -> dict[str, Any]:
    """The sizes of a product's tile."""
    return {
        "BLOCKS": matrix.blocks,
        "ROWS": code.ROW_TILE,
        "OUTPUTS": OUTPUTS,
        "COLUMNS": COLUMNS,
    }
