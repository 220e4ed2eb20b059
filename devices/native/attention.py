"""Attention of a decode step over a KV cache in blocks, as one native call.

Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from .arguments import Attend
from .compiled import library
from .kernels import NativeKernels, Tensor, address, check

_LENGTHS, _BLOCKS = Attend.lengths.offset // 8, Attend.blocks.offset // 8


class CachedLayer(NamedTuple):
    """A layer's keys and values, (slots, K, d) each, as C reads them: their addresses, and the tokens of a block."""

    keys: int
    values: int
    block_size: int


class SequencesInBlocks(NamedTuple):
    """The tokens of each sequence, new ones included, and the blocks that hold them, one sequence after the other."""

    lengths: array[int]
    blocks: array[int]


class AttentionCall:
    """A call of attention whose tensors stay where they are, for as many sequences."""

    __slots__ = ("_fields", "_run")

    def __init__(self, run: Callable[[], int], arguments: Attend) -> None:
        self._run = run
        self._fields = memoryview(arguments).cast("B").cast("q")

    def __call__(self, sequences: SequencesInBlocks) -> None:
        fields = self._fields
        fields[_LENGTHS], fields[_BLOCKS] = address(sequences.lengths), address(sequences.blocks)
        check(self._run())


class NativeAttention:
    """Attention of one new token per sequence.

    A sequence's bits depend on the instruction set alone: not on the other sequences, the blocks that hold its tokens
    or the number of threads.

    window: tokens that a query sees, itself included; None for all.
    """

    def __init__(self, kernels: NativeKernels, window: int | None = None) -> None:
        self._bound = kernels.bound
        self._attend = library().moesched_attend
        self._window = window or 0

    def attend(
        self, q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, cached: CachedLayer, sequences: SequencesInBlocks
    ) -> Tensor:
        """Store the new tokens' keys and values in the cache, and attend over it: (S, H * d).

        All tensors are contiguous, on the CPU, and of the cache's type, which is one of `DTYPES`.
        """
        count, heads, head_dim = q_SHd.shape
        out_SX = torch.empty(count, heads * head_dim, dtype=q_SHd.dtype)
        self.prepared(q_SHd, k_SKd, v_SKd, cached, out_SX)(sequences)
        return out_SX

    def prepared(
        self, q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, cached: CachedLayer, out_SX: Tensor
    ) -> AttentionCall:
        """The same call, to be made often with what these tensors then have; they are to live as long."""
        count, heads, head_dim = q_SHd.shape
        kv_heads = k_SKd.shape[1]
        arguments = Attend(
            number_bytes=q_SHd.element_size(),
            sequences=count,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=self._window,
            block_size=cached.block_size,
            query_stride=heads * head_dim,
            new_stride=kv_heads * head_dim,
            scale=head_dim**-0.5,
            keys=cached.keys,
            values=cached.values,
            queries=q_SHd.data_ptr(),
            new_keys=k_SKd.data_ptr(),
            new_values=v_SKd.data_ptr(),
            out=out_SX.data_ptr(),
        )
        return AttentionCall(self._bound(self._attend, arguments), arguments)


@lru_cache(maxsize=64)
def one_after_the_other(blocks: int) -> array[int]:
    """The blocks of sequences that follow each other from the first block on."""
    return array("q", range(blocks))
