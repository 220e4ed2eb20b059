"""Products with weights in blocks, and experts computed by such products, on any torch device.

A weight matrix W (N outputs, D inputs) comes as row blocks, top to bottom, each with some of its N rows, as a page may
hold only a part of W. If the files hold the transpose of W, it comes as column blocks instead, left to right, each with
some of its D columns, each column contiguous. A block may be packed (see `packed_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from moesched.models.layout import KERNEL_ROWS

from ..shared.coded import Block
from .packed_weights import packed_linear
from .plain_weights import plain_linear

Tensor = torch.Tensor
Blocks = Sequence[Tensor]
NamedBlocks = dict[str, list[Block]]
"""Tensors by name, each as a list of blocks; a block is a torch tensor, or `CodedRows` in a coded format."""
Linear = Callable[[Tensor, Blocks], Tensor]


def joined(blocks: Sequence[Block]) -> list[Block]:
    """Join row blocks of a matrix that follow each other in memory into larger blocks, without a copy.

    A block is joined with the next one only if its number of rows is a multiple of 128: products then had the same bits
    as with separate blocks, in all dtypes and shapes that were tried on CPUs. With other numbers of rows, float32
    products had other bits.
    """
    found: list[Block] = []
    for block in blocks:
        above = found[-1] if found else None
        if isinstance(block, Tensor) and isinstance(above, Tensor) and _follows(block, above):
            found.pop()
            shape = (len(above) + len(block), *above.shape[1:])
            block = above.as_strided(shape, above.stride(), above.storage_offset())
        found.append(block)
    return found


def _follows(block: Tensor, above: Tensor) -> bool:
    """Test whether a block begins where `above` ends, in the same allocation."""
    if len(above) % KERNEL_ROWS or not above.is_contiguous() or not block.is_contiguous():
        return False
    end = (above.storage_offset() + above.numel() + block.numel()) * above.itemsize
    return (
        above.data_ptr() + above.nbytes == block.data_ptr()
        and end <= above.untyped_storage().nbytes()
        and above.shape[1:] == block.shape[1:]
        and above.dtype == block.dtype
    )


def linear(x_TD: Tensor, blocks: Blocks) -> Tensor:
    """Multiply x by W (N, D): x @ W.T, (T, N); each block has some of W's rows, or each has some of its columns."""
    if len(blocks) == 1:
        return _linear(x_TD, blocks[0])
    if blocks[0].shape[1] < x_TD.shape[1]:
        return _sum_of_products(x_TD, blocks)
    return torch.cat([_linear(x_TD, block) for block in blocks], dim=-1)


def _linear(x_TD: Tensor, block_ND: Tensor) -> Tensor:
    return packed_linear(x_TD, block_ND) if block_ND.is_mkldnn else plain_linear(x_TD, block_ND)


def _sum_of_products(x_TD: Tensor, blocks: Blocks) -> Tensor:
    """Multiply rows by W in column blocks (N, some of D); the products are added in float32 and rounded once."""
    total_TN = x_TD.new_zeros(len(x_TD), blocks[0].shape[0], dtype=torch.float32)
    start = 0
    for block in blocks:
        stop = start + block.shape[1]
        total_TN += _linear(x_TD[:, start:stop], block)
        start = stop
    return total_TN.to(x_TD.dtype)


def expert_ffn(x_nD: Tensor, gate: Blocks, up: Blocks, down: Blocks) -> Tensor:
    """Run one expert on n rows: down @ (silu(gate @ x) * (up @ x)); returns (n, D)."""
    return linear(gated(x_nD, gate).mul_(linear(x_nD, up)), down)


def gated(x_nD: Tensor, gate: Blocks) -> Tensor:
    """Compute the activations silu(gate @ x) of an expert on n rows of x: (n, I); gate comes as row blocks."""
    return F.silu(linear(x_nD, gate), inplace=True)
