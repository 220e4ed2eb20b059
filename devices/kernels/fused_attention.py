"""Limits of torch's attention on GPUs: the heads with a fused kernel, and the most queries a call has without one."""

from __future__ import annotations

import torch

FLASH_SINCE = (8, 0)
"""Least compute capability for flash attention, and for bfloat16 in any fused kernel."""
LARGEST_FLASH_HEAD = 256
PIECE_BYTES = 64 << 20
"""Largest number of bytes of scores in one call without a fused kernel; torch holds a few copies of them at once."""


def has_fused_attention(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> bool:
    """Test whether torch has a fused kernel for heads of this size on a GPU of this compute capability.

    Flash attention takes 16-bit dtypes; memory-efficient attention takes head sizes that are multiples of 8.
    """
    if capability >= FLASH_SINCE and dtype != torch.float32:
        return head_dim <= LARGEST_FLASH_HEAD or head_dim % 8 == 0
    return dtype != torch.bfloat16 and head_dim % 8 == 0


def prefer_kernels_without_plans() -> None:
    """Turn off cuDNN's attention in torch, which may make a new execution plan for each length of the KV cache."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def queries_in_a_piece(heads: int, length: int) -> int:
    """Return the largest number of queries whose float32 scores (heads, queries, length) fit in 64 MiB; at least 1."""
    return max(1, PIECE_BYTES // (4 * heads * length))
