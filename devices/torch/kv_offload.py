"""Copies of new keys and values from a GPU to the host's KV cache."""

from __future__ import annotations

from moesched.models.config import ModelConfig
from moesched.models.host_buffers import KV_PIECE_BYTES, kv_piece_tokens

from ..products.linear import Tensor
from .compute import Compute
from .copies import wait_for_copies
from .kv_cache import CachedLayer
from .kv_step import KVStep
from .locked_memory import locked_if_possible


class KVOffload:
    """Copies keys and values from a GPU to the host's KV cache, through two page-locked buffers that take turns.

    Only one task at a time may use the buffers.

    Args:
        tokens: the largest number of tokens of a step.
        piece_bytes: the largest number of bytes of each buffer.
    """

    def __init__(
        self, config: ModelConfig, tokens: int, compute: Compute, piece_bytes: int = KV_PIECE_BYTES
    ) -> None:
        self._accelerator = compute.accelerator
        attention = config.attention
        token_bytes = attention.cache_width * compute.dtype.itemsize
        self._tokens = kv_piece_tokens(token_bytes, tokens, piece_bytes)
        shape = 2, 2, self._tokens, attention.kv_heads, attention.head_dim
        memory = locked_if_possible(
            2 * self._tokens * token_bytes, self._accelerator, "memory for new keys and values"
        )
        self._buffers = memory.view(compute.dtype).view(shape)

    def write(self, cached: CachedLayer, step: KVStep, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Store the keys and values of a step's new tokens in a layer of the host's cache; returns when all are stored.

        Args:
            cached: the layer of the cache.
            k_TKd, v_TKd: the keys and values of all new tokens, on the accelerator.
        """
        pieces = [
            range(start, min(start + self._tokens, span.stop))
            for span in step.kept
            for start in range(span.start, span.stop, self._tokens)
        ]
        stored = 0
        for number, piece in enumerate(pieces):
            if number == 0:
                self._copy(number, piece, k_TKd, v_TKd)
            wait_for_copies(self._accelerator)
            if number + 1 < len(pieces):
                self._copy(number + 1, pieces[number + 1], k_TKd, v_TKd)
            keys, values = self._buffers[number % 2, :, : len(piece)]
            cached.cache.store(cached.layer, step, keys, values, stored)
            stored += len(piece)

    def _copy(self, number: int, piece: range, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Start to copy the keys and values of some new tokens to one of the two buffers.

        Args:
            number: number of the piece; even pieces go to the first buffer, odd ones to the second.
            piece: the range of the tokens among all new tokens.
        """
        for buffer, new_TKd in zip(self._buffers[number % 2], (k_TKd, v_TKd), strict=True):
            buffer[: len(piece)].copy_(new_TKd[piece.start : piece.stop], non_blocking=True)
