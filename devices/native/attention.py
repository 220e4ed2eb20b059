"""Attention by the native library: in decode steps over a KV cache in blocks, and for prompts.

`devices/kernels/functions.py` explains the letters of shapes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .arguments import Attend, Prompts
from .compiled import library
from .kernels import NativeKernels, Tensor, address, no_memory

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of queries, keys and values that the library takes."""

PROMPT_INSTRUCTIONS = "avx512_bf16"
"""The instruction set that has kernels for attention of prompts."""
HEAD_MULTIPLE, MOST_HEAD, MOST_GROUP = 32, 256, 246
"""Limits of prompt_attention.c: the number that a head's size is a multiple of, the largest size of a head, and the
largest number of query heads that share a key head.
"""

_LENGTHS, _BLOCKS = Attend.lengths.offset // 8, Attend.blocks.offset // 8


class LayerAddresses(NamedTuple):
    """The addresses of a layer's cached keys and values, each (slots, KV heads, head size), as arguments for C.

    Attributes:
        keys, values: addresses of the first key and of the first value.
        block_size: tokens in a block.
        window: tokens that a query sees, itself included; None for all.
    """

    keys: int
    values: int
    block_size: int
    window: int | None = None


class SequencesInBlocks(NamedTuple):
    """The lengths and the KV cache blocks of sequences, as arguments for C.

    Attributes:
        lengths: number of tokens of each sequence, the new ones included.
        blocks: the numbers of the blocks of all sequences, one sequence after the other.
        addresses: the addresses of both arrays, which must not grow.
    """

    lengths: array[int]
    blocks: array[int]
    addresses: tuple[int, int]

    @classmethod
    def of(cls, lengths: array[int], blocks: array[int]) -> SequencesInBlocks:
        """Describe sequences by these arrays."""
        return cls(lengths, blocks, (address(lengths), address(blocks)))


class AttentionCall:
    """A native call of attention with fixed tensors, which is repeated with other lengths and blocks of sequences."""

    __slots__ = ("_fields", "_run")

    def __init__(self, run: Callable[[], int], arguments: Attend) -> None:
        self._run = run
        self._fields = memoryview(arguments).cast("B").cast("q")

    def __call__(self, sequences: SequencesInBlocks) -> None:
        fields = self._fields
        fields[_LENGTHS], fields[_BLOCKS] = sequences.addresses
        if self._run():
            raise no_memory()


class NativeAttention:
    """Attends by the native library: from one new token of each sequence, or from the new tokens of prompts.

    The bits of a token's result depend only on its sequence and the instruction set, not on other sequences, the blocks
    of the cache, the chunks of a prompt, or the number of threads.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        self._bound = kernels.bound
        self._attend = library().moesched_attend

    def attend(
        self,
        q_SHd: Tensor,
        k_SKd: Tensor,
        v_SKd: Tensor,
        cached: LayerAddresses,
        sequences: SequencesInBlocks,
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store the key and value of one new token of each of S sequences, and attend over its sequence: (S, H * d).

        All tensors are contiguous, on the CPU, and of the cache's dtype, which is one of `DTYPES`.

        Args:
            q_SHd, k_SKd, v_SKd: queries, keys and values of the new tokens.
            cached: the layer's KV cache.
            sinks_H: the score of each head's attention sink, float32; None without sinks.
            scale: factor on the scores; by default one over the square root of d.
        """
        count, heads, head_dim = q_SHd.shape
        out_SX = torch.empty(count, heads * head_dim, dtype=q_SHd.dtype)
        self.prepared(q_SHd, k_SKd, v_SKd, cached, out_SX, sinks_H, scale)(sequences)
        return out_SX

    def prepared(
        self,
        q_SHd: Tensor,
        k_SKd: Tensor,
        v_SKd: Tensor,
        cached: LayerAddresses,
        out_SX: Tensor,
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> AttentionCall:
        """Return a function that does with these tensors what `attend` does, for the sequences given in each call.

        The tensors must live as long as the function.

        Args:
            q_SHd, k_SKd, v_SKd: queries, keys and values of the new tokens.
            cached: the layer's KV cache.
            out_SX: receives the results (S, H * d).
            sinks_H, scale: as for `attend`.
        """
        count, heads, head_dim = q_SHd.shape
        kv_heads = k_SKd.shape[1]
        arguments = Attend(
            number_bytes=q_SHd.element_size(),
            sequences=count,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=cached.window or 0,
            block_size=cached.block_size,
            query_stride=heads * head_dim,
            new_stride=kv_heads * head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            keys=cached.keys,
            values=cached.values,
            queries=q_SHd.data_ptr(),
            new_keys=k_SKd.data_ptr(),
            new_values=v_SKd.data_ptr(),
            sinks=None if sinks_H is None else sinks_H.data_ptr(),
            out=out_SX.data_ptr(),
        )
        return AttentionCall(self._bound(self._attend, arguments), arguments)

    def attend_prompts(
        self,
        q_THd: Tensor,
        views: Iterable[tuple[Tensor, Tensor, int]],
        window: int | None = None,
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend from T new tokens over keys and values that include the new tokens' own; returns (T, H * d).

        Call this only if `refuses_prompts` returns no reason.

        Args:
            q_THd: queries, bfloat16, contiguous, on the CPU.
            views: for each group of equally long sequences: keys and values, both (S, L, K, d) with the same strides,
                and the number of new tokens of each sequence.
            window: number of tokens that a query sees, itself included; None for all earlier tokens.
            sinks_H: the score of each head's attention sink, float32; None without sinks.
            scale: factor on the scores; None for 1 / sqrt(d).
        """
        tokens, heads, head_dim = q_THd.shape
        out_TX = q_THd.new_empty(tokens, heads * head_dim)
        start = 0
        for keys_SLKd, values_SLKd, queries in views:
            assert keys_SLKd.stride() == values_SLKd.stride(), "one set of strides is for both"
            sequences, length, kv_heads, _ = keys_SLKd.shape
            sequence_stride, token_stride, head_stride, _ = keys_SLKd.stride()
            arguments = Prompts(
                sequences=sequences,
                queries=queries,
                length=length,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                window=window or 0,
                sequence_stride=sequence_stride,
                token_stride=token_stride,
                head_stride=head_stride,
                scale=head_dim**-0.5 if scale is None else scale,
                keys=keys_SLKd.data_ptr(),
                values=values_SLKd.data_ptr(),
                new_queries=q_THd[start:].data_ptr(),
                sinks=None if sinks_H is None else sinks_H.data_ptr(),
                out=out_TX[start:].data_ptr(),
            )
            refused = self._bound(library().moesched_attend_prompts, arguments)()
            assert not refused, "`refuses_prompts` said that it takes them"
            start += sequences * queries
        return out_TX


def refuses_prompts(instruction_set: str, heads: int, kv_heads: int, head_dim: int) -> str:
    """Return the reason why `attend_prompts` cannot take this instruction set or these heads; empty if it can."""
    if instruction_set != PROMPT_INSTRUCTIONS:
        return f"it needs {PROMPT_INSTRUCTIONS}; with AMX, torch is faster"
    if head_dim % HEAD_MULTIPLE or head_dim > MOST_HEAD:
        return f"it takes heads of a multiple of {HEAD_MULTIPLE}, up to {MOST_HEAD}"
    if heads // kv_heads > MOST_GROUP:
        return f"it takes up to {MOST_GROUP} heads that share keys"
    return ""
