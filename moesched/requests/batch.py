"""Requests that run together: lengths, micro-batches, and tokens in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from moesched.models.kv_blocks import KV_BLOCK_TOKENS, cached_tokens, cached_tokens_of_beams
from moesched.requests.chunks import Chunk, chunks_of_batch, fullest_steps


class Batch(msgspec.Struct, frozen=True):
    """Requests that run together.

    Attributes:
        prompts: prompt length in tokens, by request.
        new_tokens: tokens to generate for each request.
        micro_batches: the requests of each micro-batch, by index.
        first_request: index of the batch's first request among all requests of the run.
        beams: sequences per request in decode.
        prefill_chunk: the largest number of tokens of a micro-batch in prefill; None for no limit.
        served: whether this is continuous batching, in which requests join and leave between steps. The batch then
            describes a step of the largest size that can occur, with as many requests as may run at once. A long prompt
            is computed over several steps.
        longest: tokens of the longest prompt, if `served`.
    """

    prompts: tuple[int, ...]
    new_tokens: int
    micro_batches: tuple[tuple[int, ...], ...]
    first_request: int = 0
    beams: int = 1
    prefill_chunk: int | None = None
    served: bool = False
    longest: int = 0

    def chunks(self) -> Mapping[int, Chunk]:
        """Return the chunks of prompts by number; each chunk is one micro-batch of prefill, with the same number."""
        if self.served and self.prefill_chunk is not None:
            return fullest_steps(self.micro_batches, self.prefill_chunk, self.longest)
        return chunks_of_batch(self.prompts, self.micro_batches, self.prefill_chunk)

    @property
    def chunked(self) -> bool:
        """True if the prompts of a micro-batch are cut into several chunks; False in continuous batching."""
        most, prompts = self.prefill_chunk, self.prompts
        return (most is not None and not self.served) and any(
            sum(prompts[request] for request in requests) > most for requests in self.micro_batches
        )

    @property
    def cache_tokens(self) -> int:
        """Tokens of all requests in the KV cache at the end of the generation, rounded up to whole blocks."""
        return self.tokens_at_end(range(len(self.prompts)))

    def tokens_at_end(self, requests: Iterable[int]) -> int:
        """Return the tokens that these requests together take in the KV cache at the end, in whole blocks."""
        return sum(self.each_at_end(requests))

    def each_at_end(self, requests: Iterable[int]) -> list[int]:
        """Return the tokens that each of these requests takes in the KV cache at the end, in whole blocks."""
        prompts, new_tokens, beams = self.prompts, self.new_tokens, self.beams
        if beams == 1:  # written out, since planning asks for thousands again and again
            return [
                -(-(prompts[request] + new_tokens) // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
                for request in requests
            ]
        return [cached_tokens_of_beams(prompts[request], new_tokens, beams) for request in requests]

    def unshared_at_end(self, requests: Iterable[int]) -> list[int]:
        """Return the tokens that each request would take in the KV cache at the end, if its beams shared no blocks."""
        beams, new_tokens = self.beams, self.new_tokens
        return [beams * cached_tokens(self.prompts[request] + new_tokens) for request in requests]

    def sequences(self, requests: Sequence[int]) -> int:
        """Return the number of sequences of these requests in decode: one for each beam."""
        return self.beams * len(requests)

    @property
    def largest(self) -> int:
        """The largest number of prompt tokens of a micro-batch."""
        return max(sum(self.prompts[request] for request in requests) for requests in self.micro_batches)


def split_batch(
    prompts: Sequence[int], new_tokens: int, micro_batch_size: int, first_request: int = 0
) -> Batch:
    """Divide requests, in order, into micro-batches of `micro_batch_size`; the last may be smaller."""
    size = min(micro_batch_size, len(prompts))
    starts = range(0, len(prompts), size)
    parts = tuple(tuple(range(start, min(start + size, len(prompts)))) for start in starts)
    return Batch(tuple(prompts), new_tokens, parts, first_request)
