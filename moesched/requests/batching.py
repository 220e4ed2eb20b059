"""Assignment of requests with different prompt lengths to batches and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.models.kv_blocks import cached_tokens_of_beams
from moesched.requests.batch import Batch


class BatchSizes(NamedTuple):
    """Largest number of requests and tokens of batches and micro-batches, as a plan chooses them.

    Attributes:
        batch_size: the largest number of requests that run together.
        micro_batch_size: the largest number of requests of a micro-batch.
        cache_tokens: the most tokens of a micro-batch in the KV cache when generation ends, counted in whole blocks;
            None for no limit.
        kv_on_gpu: share of the KV cache that stays on the accelerator; None leaves it to the policy.
        beams: sequences per request in decode.
        prefill_chunk: the largest number of tokens of a micro-batch in prefill; None for no limit.
    """

    batch_size: int
    micro_batch_size: int
    cache_tokens: int | None = None
    kv_on_gpu: float | None = None
    beams: int = 1
    prefill_chunk: int | None = None

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a full batch."""
        return -(-self.batch_size // self.micro_batch_size)


class Placed(NamedTuple):
    """Result of `assign_requests`: indices of the requests of each micro-batch, and of those left for later batches."""

    micro_batches: list[list[int]]
    deferred: list[int]


def assign_requests(
    prompts: Sequence[int],
    new_tokens: int,
    *,
    micro_batches: int,
    micro_batch_size: int,
    cache_tokens: int | None = None,
    beams: int = 1,
) -> Placed:
    """Assign the longest prompts first, each to the micro-batch with the fewest tokens.

    This is Algorithm 2 of MoE-Lightning (Appendix A.2) with two corrections. As printed, it returns only full
    micro-batches and loses the requests of all others; and once all micro-batches are full, it takes the minimum of an
    empty list. The cache is counted in allocated blocks, where the paper counts single tokens.

    Args:
        prompts: prompt lengths in tokens.
        new_tokens: tokens to generate for each request.
        micro_batches: the largest number of micro-batches.
        micro_batch_size: the largest number of requests of a micro-batch.
        cache_tokens: the largest number of tokens of a micro-batch in the KV cache at the end; None for no limit.
        beams: sequences per request in decode.

    Returns:
        Every request exactly once. Requests keep their order within a micro-batch; no micro-batch is empty.
    """
    parts: list[list[int]] = [[] for _ in range(micro_batches)]
    cached = [0] * micro_batches
    deferred = []
    open_parts = [(0, part) for part in range(micro_batches)]  # a heap: fewest prompt tokens first
    for request in sorted(range(len(prompts)), key=lambda request: -prompts[request]):
        if not open_parts:
            deferred.append(request)
            continue
        tokens, part = open_parts[0]
        needed = cached[part] + cached_tokens_of_beams(prompts[request], new_tokens, beams)
        if cache_tokens is not None and needed > cache_tokens:
            deferred.append(request)
            continue
        parts[part].append(request)
        cached[part] = needed
        if len(parts[part]) == micro_batch_size:
            heapq.heappop(open_parts)
        else:
            heapq.heapreplace(open_parts, (tokens + prompts[request], part))
    return Placed([sorted(part) for part in parts if part], sorted(deferred))


def batch_of(prompts: Sequence[int], new_tokens: int, sizes: BatchSizes, first_request: int = 0) -> Batch:
    """Form the next batch from as many of the first requests as the sizes allow, balanced over micro-batches.

    Requests are taken in order. While the cache has no room for all that were taken, the last of them are put back for
    later batches. So no request overtakes an earlier one.

    Args:
        prompts: prompt lengths in tokens, by request.

    Raises:
        BadInput: a single request exceeds the cache of a micro-batch.
    """
    taken = prompts[: sizes.batch_size]
    while taken:
        placed = assign_requests(
            taken,
            new_tokens,
            micro_batches=sizes.micro_batches,
            micro_batch_size=sizes.micro_batch_size,
            cache_tokens=sizes.cache_tokens,
            beams=sizes.beams,
        )
        if not placed.deferred:
            parts = tuple(map(tuple, placed.micro_batches))
            return Batch(tuple(taken), new_tokens, parts, first_request, sizes.beams, sizes.prefill_chunk)
        taken = taken[: len(taken) - (len(placed.deferred) + 1) // 2]
    raise BadInput(
        f"a prompt of {prompts[0]} tokens and {new_tokens} new ones are more than the {sizes.cache_tokens} tokens of "
        "KV cache of a micro-batch: lower --gen, or raise the budget"
    )


def batches_of(prompts: Sequence[int], new_tokens: int, sizes: BatchSizes) -> Iterator[Batch]:
    """Yield batches until all requests are taken; requests that do not fit in one batch go to the next.

    Args:
        prompts: prompt lengths in tokens, by request.

    Raises:
        BadInput: a single request exceeds the cache of a micro-batch.
    """
    first = 0
    while first < len(prompts):
        batch = batch_of(prompts[first : first + sizes.batch_size], new_tokens, sizes, first)
        yield batch
        first += len(batch.prompts)
