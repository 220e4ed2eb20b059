"""The requests that run together: their lengths, their micro-batches, and what they take of the KV cache in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from moesched.requests.chunks import Chunk, chunks_of

KV_BLOCK_TOKENS = 16


class Batch(msgspec.Struct, frozen=True):
    """The requests that run together.

    Attributes:
        prompts: prompt length in tokens, by request.
        new_tokens: tokens to generate for each request.
        micro_batches: the requests of each micro-batch, by index.
        first_request: how many requests of the run came in the batches before.
        beams: sequences that each request has in decode.
        prefill_chunk: tokens that a micro-batch of prefill has at most; None sets no limit.
    """

    prompts: tuple[int, ...]
    new_tokens: int
    micro_batches: tuple[tuple[int, ...], ...]
    first_request: int = 0
    beams: int = 1
    prefill_chunk: int | None = None

    def chunks(self) -> dict[int, Chunk]:
        """What each micro-batch of prefill has, by its number."""
        return chunks_of(self.prompts, self.micro_batches, self.prefill_chunk)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache must hold at the end, whole blocks of it."""
        return self.tokens_at_end(range(len(self.prompts)))

    def tokens_at_end(self, requests: Iterable[int]) -> int:
        """What these requests have in the KV cache at the end, in whole blocks."""
        return sum(
            cached_tokens_of_beams(self.prompts[request], self.new_tokens, self.beams) for request in requests
        )

    def longest_at_end(self, requests: Iterable[int]) -> int:
        """What all sequences of these requests have in the KV cache at the end, if none shared blocks with others."""
        return self.beams * sum(
            cached_tokens(self.prompts[request] + self.new_tokens) for request in requests
        )

    def sequences(self, requests: Sequence[int]) -> int:
        """How many sequences these requests have in decode."""
        return self.beams * len(requests)

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch, which is its prefill."""
        return max(sum(self.prompts[request] for request in requests) for requests in self.micro_batches)


def cached_tokens(length: int) -> int:
    """What a request of so many tokens takes of the KV cache, in whole blocks."""
    return -(-length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def cached_tokens_of_beams(prompt: int, new_tokens: int, beams: int) -> int:
    """What a request takes of the KV cache, in whole blocks: all its beams share the full blocks of the prompt."""
    shared = prompt // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    return shared + beams * (cached_tokens(prompt + new_tokens) - shared)


def split_batch(
    prompts: Sequence[int], new_tokens: int, micro_batch_size: int, first_request: int = 0
) -> Batch:
    """Requests in their order, cut into micro-batches of `micro_batch_size` requests (the last may hold fewer)."""
    size = min(micro_batch_size, len(prompts))
    starts = range(0, len(prompts), size)
    parts = tuple(tuple(range(start, min(start + size, len(prompts)))) for start in starts)
    return Batch(tuple(prompts), new_tokens, parts, first_request)
