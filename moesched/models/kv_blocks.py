"""Numbers of tokens in KV caches, rounded up to whole blocks; with a sliding window, only the window's blocks."""

from __future__ import annotations

from collections.abc import Iterable

KV_BLOCK_TOKENS = 16
PROMPT_TILE = 64
"""Tokens of a prompt in a tile; attention goes tile by tile. The last bits of results depend on where tiles begin."""


def cached_tokens(length: int) -> int:
    """Round the length of a sequence, in tokens, up to whole blocks of a KV cache."""
    return -(-length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def cached_tokens_of_beams(prompt: int, new_tokens: int, beams: int) -> int:
    """Return the number of tokens for which a request's blocks in the KV cache have room, of all beams together.

    The request's beams share the full blocks of the prompt, and each beam has its own copy of the rest.

    Args:
        prompt: number of tokens of the prompt.
        new_tokens: number of generated tokens of each beam.
    """
    shared = prompt // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    return shared + beams * (cached_tokens(prompt + new_tokens) - shared)


def window_tokens(window: int) -> int:
    """Return the largest number of tokens that a sequence has in the cache of a sliding-window layer, in whole blocks.

    The window may begin anywhere in a block, so one more block is needed than the window fills.
    """
    return cached_tokens(window - 1) + KV_BLOCK_TOKENS


def kept_tokens(tokens: int, most: int | None, beams: int = 1) -> int:
    """Return the number of a request's tokens that are still in a cache, summed over its beams.

    Args:
        tokens: number of the request's tokens that were ever put in the cache, summed over its beams.
        most: the most tokens that the cache keeps of one beam, the latest ones; None for all.
        beams: number of beams of the request.
    """
    return tokens if most is None else min(tokens, beams * most)


def tokens_beside(starts: Iterable[int], tokens: Iterable[int], most: int | None) -> int:
    """Return an upper bound on the tokens that a chunk of prompts needs room for beside a sliding window's cache.

    The chunk overwrites a part of the cache. So the keys and values that it attends to, cached ones and its own, are
    first put in other memory.

    Args:
        starts: for each request, its number of tokens before the chunk; those still in the cache are copied.
        tokens: for each request, its number of tokens in the chunk.
        most: the most tokens that the cache keeps of a sequence; None if it keeps all, so that nothing is copied.
    """
    if most is None:
        return 0
    both = zip(starts, tokens, strict=True)
    rounding = PROMPT_TILE - 1 + KV_BLOCK_TOKENS - 1
    return sum(min(start, most) + new + rounding for start, new in both)
