"""Numbers of tokens that KV caches hold: in whole blocks, and with a sliding window no more than the window needs."""

from __future__ import annotations

from collections.abc import Iterable

KV_BLOCK_TOKENS = 16
PROMPT_TILE = 64
"""Tokens of the tiles in which prompts attend. The bits depend on the positions at which tiles begin."""


def cached_tokens(length: int) -> int:
    """Tokens that a sequence of this length takes in a cache of keys and values, in whole blocks."""
    return -(-length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def cached_tokens_of_beams(prompt: int, new_tokens: int, beams: int) -> int:
    """Tokens that a request takes in the KV cache, in whole blocks; its beams share the full blocks of the prompt."""
    shared = prompt // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    return shared + beams * (cached_tokens(prompt + new_tokens) - shared)


def window_tokens(window: int) -> int:
    """Most tokens that a sequence takes in the cache of a window, in whole blocks.

    The window before a new token may begin anywhere in a block, so it takes its own blocks and one more.
    """
    return cached_tokens(window - 1) + KV_BLOCK_TOKENS


def kept_tokens(tokens: int, most: int | None, beams: int = 1) -> int:
    """Tokens that a cache still holds of a request after `tokens` of its tokens were cached.

    most: as `most_cached` of a kind of attention gives it, for each beam.
    """
    return tokens if most is None else min(tokens, beams * most)


def tokens_beside(starts: Iterable[int], tokens: Iterable[int], most: int | None) -> int:
    """Tokens whose keys and values a chunk of prompts has beside a window's cache, of which it overwrites a part.

    Args:
        starts: each request's tokens before the chunk; those that are still in the cache are copied.
        tokens: each request's tokens in the chunk.
        most: as in `kept_tokens`.
    """
    if most is None:
        return 0
    both = zip(starts, tokens, strict=True)
    return sum(cached_tokens(PROMPT_TILE - 1 + min(start, most) + new) for start, new in both)
