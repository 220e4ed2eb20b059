"""Attention of a decode step over a KV cache in blocks, as one native call.

Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import NamedTuple

import torch

from .arguments import Attend
from .compiled import library
from .kernels import NativeKernels, Tensor, address


class CachedLayer(NamedTuple):
    """A layer's keys and values, (slots, K, d) each, as C reads them: their addresses, and the tokens of a block."""

    keys: int
    values: int
    block_size: int


class SequencesInBlocks(NamedTuple):
    """The tokens of each sequence, new ones included, and the blocks that hold them, one sequence after the other."""

    lengths: array[int]
    blocks: array[int]


class NativeAttention:
    """Attention of one new token per sequence.

    A sequence's bits depend on the instruction set alone: not on the other sequences, the blocks that hold its tokens
    or the number of threads.

    window: tokens that a query sees, itself included; None for all.
    """

    def __init__(self, kernels: NativeKernels, window: int | None = None) -> None:
        self._call = kernels.call
        self._attend = library().moesched_attend
        self._window = window or 0

    def attend(
        self, q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, cached: CachedLayer, sequences: SequencesInBlocks
    ) -> Tensor:
        """Store the new tokens' keys and values in the cache, and attend over it: (S, H * d).

        All tensors are contiguous, on the CPU, and of the cache's type, which is one of `DTYPES`.
        """
        count, heads, head_dim = q_SHd.shape
        kv_heads = k_SKd.shape[1]
        out_SX = torch.empty(count, heads * head_dim, dtype=q_SHd.dtype)
        arguments = Attend(
            q_SHd.element_size(),
            count,
            heads,
            kv_heads,
            head_dim,
            self._window,
            cached.block_size,
            heads * head_dim,
            kv_heads * head_dim,
            head_dim**-0.5,
            address(sequences.lengths),
            address(sequences.blocks),
            cached.keys,
            cached.values,
            q_SHd.data_ptr(),
            k_SKd.data_ptr(),
            v_SKd.data_ptr(),
            out_SX.data_ptr(),
        )
        self._call(self._attend, arguments)
        return out_SX


@lru_cache(maxsize=64)
def one_after_the_other(blocks: int) -> array[int]:
    """The blocks of sequences that follow each other from the first block on."""
    return array("q", range(blocks))
