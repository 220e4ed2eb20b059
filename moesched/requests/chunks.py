"""Chunked prefill: the prompt tokens that pass a layer together.

The activations of a micro-batch within a layer grow with its tokens. Prefill may therefore cut the prompts of a
micro-batch into chunks of a limited number of tokens, each of which is a micro-batch of its own in prefill. All chunks
pass a layer before the next layer begins, so that weights are loaded no more often than without chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress, groupby
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple


class Chunk(NamedTuple):
    """Micro-batch of prefill: some or all of the prompt tokens of a micro-batch of decode.

    Attributes:
        micro_batch: number of the micro-batch of decode.
        requests: requests with tokens in this chunk.
        starts: number of tokens of each of these requests in earlier chunks.
        tokens: number of tokens of each of these requests in this chunk.
        ends: requests whose prompts end in this chunk; their first tokens are sampled after it.
        before: number of the chunk that this one continues; -1 for the first of a micro-batch.
        last: whether this is the last chunk of the micro-batch.
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
    """Divide prompts into chunks, keyed by the number of the micro-batch of prefill.

    If each micro-batch of decode needs only one chunk, the chunk has the micro-batch's number. Otherwise all chunks are
    numbered from `len(micro_batches)` on.

    Args:
        prompts: prompt lengths in tokens, by request.
        micro_batches: requests of each micro-batch.
        most: the largest number of tokens of a chunk; None for no limit.
    """
    chunks: list[Chunk] = []
    for number, requests in enumerate(micro_batches):
        chunks += _cut(number, requests, prompts, most)
    first = len(micro_batches) if len(chunks) > len(micro_batches) else 0
    return {
        first + index: chunk._replace(before=-1 if chunk.before < 0 else first + index - 1)
        for index, chunk in enumerate(chunks)
    }


@lru_cache(maxsize=64)
def chunks_of_batch(
    prompts: tuple[int, ...], micro_batches: tuple[tuple[int, ...], ...], most: int | None
) -> Mapping[int, Chunk]:
    """Divide prompts into chunks, as `chunks_of` does; cached, since many plans are made of a batch."""
    return MappingProxyType(chunks_of(prompts, micro_batches, most))


def fullest_steps(places: Sequence[tuple[int, ...]], most: int, longest: int) -> dict[int, Chunk]:
    """Return, for each micro-batch of continuous batching, a chunk of prompts that takes the most memory in one step.

    The chunk has `most` tokens, in equal parts of the prompts of all requests. In a step, at most one prompt has tokens
    from earlier steps. This is assumed to be the first request's prompt, with the largest possible number of earlier
    tokens, `longest`; the other prompts have none.

    Args:
        places: the requests of each micro-batch.
        most: the most prompt tokens of a micro-batch in a step.
        longest: tokens of the longest prompt.
    """
    steps = {}
    for number, requests in enumerate(places):
        each, more = divmod(most, len(requests))
        tokens = tuple(each + (place < more) for place in range(len(requests)))
        starts = longest, *(0,) * (len(requests) - 1)
        steps[number] = Chunk(number, requests, starts, tokens, requests, -1, last=True)
    return steps


def _cut(number: int, requests: Sequence[int], prompts: Sequence[int], most: int | None) -> list[Chunk]:
    """Divide the prompts of one micro-batch of decode into chunks.

    `before` is -1 in the first chunk and 0 in later ones; the caller replaces the 0 by the number of the chunk before.

    Args:
        number: the micro-batch's number.
        most: the largest number of tokens of a chunk; None for no limit.
    """
    whole = tuple(prompts[request] for request in requests)
    total = sum(whole)
    size = total if most is None else min(most, total)
    if size == total and all(whole):
        mine = tuple(requests)
        return [Chunk(number, mine, (0,) * len(mine), whole, mine, -1, last=True)]
    chunks = []
    for first, parts in groupby(_parts(requests, whole, size), key=itemgetter(0)):
        _, mine, starts, lengths, ends = zip(*parts, strict=True)
        ended = tuple(compress(mine, ends))
        last = first + sum(lengths) == total
        chunks.append(Chunk(number, mine, starts, lengths, ended, 0 if first else -1, last=last))
    return chunks


def _parts(
    requests: Sequence[int], prompts: Iterable[int], size: int
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Cut requests' prompts, one after the other, into chunks of `size` tokens.

    Yields a tuple for each prompt's part of a chunk: index of the chunk's first token in the joined prompts; request;
    index of the part's first token in its prompt; number of tokens of the part; whether the prompt ends with the part.
    """
    before = 0
    for request, prompt in zip(requests, prompts, strict=True):
        start = 0
        while start < prompt:
            place = before + start
            tokens = min(size - place % size, prompt - start)
            yield place - place % size, request, start, tokens, start + tokens == prompt
            start += tokens
        before += prompt
