"""Long prompts in chunks: which tokens of which prompts pass a layer together in prefill.

What a micro-batch has within a layer grows with its tokens. So a prefill may have more micro-batches than decoding has:
each takes up to so many tokens of one micro-batch's prompts, in their order, and goes on where the one before ended.
All of them pass a layer before the next one, so that no weight is brought in more often than without chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """What one micro-batch has in prefill: some of the tokens of a micro-batch's prompts, or all of them.

    Attributes:
        micro_batch: whose prompts they are.
        requests: those that have tokens in it.
        starts: how many tokens of each of them came in the chunks before.
        tokens: how many of each of them it has.
        ends: the requests whose prompts end in it, so that their first tokens are sampled.
        before: the number of the chunk that it goes on from; -1 for a micro-batch's first.
        last: whether all of the micro-batch's prompts end in it or before.
    """

    micro_batch: int
    requests: tuple[int, ...]
    starts: tuple[int, ...]
    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    before: int
    last: bool


def chunks_of(
    prompts: Sequence[int], micro_batches: Sequence[Sequence[int]], most: int | None
) -> dict[int, Chunk]:
    """What each micro-batch of prefill has, by its number.

    Where all prompts fit, these are the micro-batches of decoding. Otherwise the numbers follow those.

    Args:
        prompts: prompt lengths in tokens, by request.
        micro_batches: the requests of each.
        most: tokens that a chunk may have; None sets no limit.
    """
    chunks: list[Chunk] = []
    for number, requests in enumerate(micro_batches):
        chunks += _cut(number, requests, prompts, most)
    first = len(micro_batches) if len(chunks) > len(micro_batches) else 0
    return {
        first + place: chunk._replace(before=-1 if chunk.before < 0 else first + place - 1)
        for place, chunk in enumerate(chunks)
    }


def _cut(number: int, requests: Sequence[int], prompts: Sequence[int], most: int | None) -> list[Chunk]:
    """The chunks of one micro-batch; `before` only says whether there is one."""
    total = sum(prompts[request] for request in requests)
    size = total if most is None else min(most, total)
    chunks = []
    for start in range(0, total, size):
        stop = min(start + size, total)
        parts = []
        ends = []
        first = 0
        for request in requests:
            end = first + prompts[request]
            tokens = min(stop, end) - max(start, first)
            if tokens > 0:
                parts.append((request, max(0, start - first), tokens))
            if tokens > 0 and end <= stop:
                ends.append(request)
            first = end
        mine, starts, lengths = zip(*parts, strict=True)
        chunks.append(
            Chunk(number, mine, starts, lengths, tuple(ends), 0 if start else -1, last=stop == total)
        )
    return chunks
