"""Sizes of page-locked host buffers through which data passes to and from an accelerator with its own memory.

The accelerator copies from and to these buffers without the host's processor, so they are page-locked, in whole pages
of the system (4 KiB), not pages of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.models.operations import Operations

CACHE_LINE = 64
"""Bytes of a cache line; torch's own tensors start at multiples of it."""

LOCKED_PAGE = 4096
NUMBER_BYTES = 8
"""Bytes of a number that kernels index by."""

NUMBER_RING_BYTES = 2 << 20
"""Bytes of the ring buffer through which index numbers go to the accelerator: enough for many decode steps."""

KV_PIECE_BYTES = 8 << 20
"""Most bytes of keys and values that are copied to the host's KV cache at a time; two buffers of this size take turns.
"""

RING_SLOTS = 4
RING_SLOT_BYTES = 16 << 20
"""Most bytes of a slot of the ring of page-locked buffers for copying pageable weights. Slots are smaller than pages,
so that the copy of a page begins when its first bytes are there.
"""


def attention_rows_bytes(operations: Operations, tokens: int) -> int:
    """Return the bytes of buffers with which a host computes a micro-batch's attention: queries, keys, values, output.

    Args:
        tokens: number of tokens of the micro-batch.
    """
    return max(
        2 * _in_lines(tokens * kind.query_width * kind.element)
        + 2 * _in_lines(tokens * kind.key_value_width // 2 * kind.element)
        for kind in operations.kinds.values()
    )


def routed_rows_bytes(operations: Operations, tokens: int) -> int:
    """Return the bytes of the buffers with which a host computes the experts of a micro-batch.

    The buffers hold hidden states, the token of each expert row, and the experts' input rows and output rows.

    Args:
        tokens: number of tokens of the micro-batch.
    """
    return sum(map(_in_lines, _routed(operations, tokens)))


def routed_prompt_bytes(operations: Operations, tokens: int) -> int:
    """Return the bytes of buffers, freed after each layer, with which a host computes experts in prefill.

    Each buffer is allocated with its size rounded up to a power of two.

    Args:
        tokens: number of tokens of the micro-batch.
    """
    return sum(1 << (nbytes - 1).bit_length() for nbytes in _routed(operations, tokens))


def kv_piece_tokens(token_bytes: int, tokens: int, piece_bytes: int = KV_PIECE_BYTES) -> int:
    """Return the number of tokens whose keys and values are copied to the host's KV cache at a time.

    Args:
        token_bytes: bytes of a token's key and value in one layer.
        tokens: number of tokens of the largest step.
        piece_bytes: the largest number of bytes to copy at a time.
    """
    return max(1, min(tokens, piece_bytes // token_bytes))


def kv_pieces_bytes(operations: Operations, tokens: int) -> int:
    """Return the bytes of the two buffers through which new keys and values are copied to the host's KV cache.

    Args:
        tokens: number of tokens of the largest step.
    """
    token_bytes = max(kind.kv_bytes for kind in operations.kinds.values())
    return 2 * token_bytes * kv_piece_tokens(token_bytes, tokens) if token_bytes else 0


def ring_slot_bytes(page_bytes: int) -> int:
    """Return the bytes of one slot of the ring of page-locked buffers through which pageable host weights are copied.

    Args:
        page_bytes: bytes of the largest page of weights to copy.
    """
    return min(RING_SLOT_BYTES, page_bytes)


def in_pages(nbytes: int) -> int:
    """Round a number of bytes up to whole 4 KiB pages of page-locked memory."""
    return -(-nbytes // LOCKED_PAGE) * LOCKED_PAGE


def _routed(operations: Operations, tokens: int) -> Sequence[int]:
    rows, hidden = tokens * operations.config.routed.top_k, operations.hidden_bytes
    return tokens * hidden, rows * NUMBER_BYTES, rows * hidden, rows * hidden


def _in_lines(nbytes: int) -> int:
    """Round a number of bytes up to whole cache lines, so that each buffer begins at a cache line.

    The lowest bits of a matrix product may depend on this alignment.
    """
    return -(-nbytes // CACHE_LINE) * CACHE_LINE
