"""Batches of requests with prompts of different lengths: which run together, and which of them share a kernel."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.requests.batch import Batch, cached_tokens_of_beams


class BatchSizes(NamedTuple):
    """What a plan says of its batches.

    Attributes:
        batch_size: requests that run together, at most.
        micro_batch_size: requests that share a kernel, at most.
        cache_tokens: what a micro-batch may have in the KV cache at the end, in whole blocks; None sets no limit.
        kv_on_gpu: the share of the micro-batches whose KV cache stays on the accelerator; None leaves it to the policy.
        beams: sequences that each request has in decode.
        prefill_chunk: tokens that a micro-batch of prefill has at most; None sets no limit.
    """

    batch_size: int
    micro_batch_size: int
    cache_tokens: int | None = None
    kv_on_gpu: float | None = None
    beams: int = 1
    prefill_chunk: int | None = None

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a full batch has."""
        return -(-self.batch_size // self.micro_batch_size)


class Placed(NamedTuple):
    """Requests by index: those of each micro-batch, and those that found no place."""

    micro_batches: list[list[int]]
    left: list[int]


def assign_requests(
    prompts: Sequence[int],
    new_tokens: int,
    *,
    micro_batches: int,
    micro_batch_size: int,
    cache_tokens: int | None = None,
    beams: int = 1,
) -> Placed:
    """Algorithm 2 of MoE-Lightning (Appendix A.2): the longest prompt goes to the micro-batch with the fewest tokens.

    Two repairs to the algorithm as it is printed. There a micro-batch is given out only when it is full, so that the
    requests of all others are lost: here those come out too. And there a request is put back when all micro-batches are
    full, but the search for the one with the fewest tokens goes on over an empty list: here it ends. The cache is
    counted in the blocks that will be allocated; the paper counts single tokens.

    Args:
        prompts: prompt lengths in tokens.
        new_tokens: tokens to generate for each request.
        micro_batches: how many there may be.
        micro_batch_size: requests that each may have.
        cache_tokens: what each may have in the KV cache at the end; None sets no limit.
        beams: sequences that each request has in decode.

    Returns:
        Every request, once. Within a micro-batch they keep their order; no micro-batch is empty.
    """
    parts: list[list[int]] = [[] for _ in range(micro_batches)]
    cached = [0] * micro_batches
    left = []
    open_parts = [(0, part) for part in range(micro_batches)]  # a heap: fewest prompt tokens first
    for request in sorted(range(len(prompts)), key=lambda request: -prompts[request]):
        if not open_parts:
            left.append(request)
            continue
        tokens, part = open_parts[0]
        needed = cached[part] + cached_tokens_of_beams(prompts[request], new_tokens, beams)
        if cache_tokens is not None and needed > cache_tokens:
            left.append(request)
            continue
        parts[part].append(request)
        cached[part] = needed
        if len(parts[part]) == micro_batch_size:
            heapq.heappop(open_parts)
        else:
            heapq.heapreplace(open_parts, (tokens + prompts[request], part))
    return Placed([sorted(part) for part in parts if part], sorted(left))


def batch_of(prompts: Sequence[int], new_tokens: int, sizes: BatchSizes, first_request: int = 0) -> Batch:
    """The next batch: the first prompts, as many as the sizes allow, spread evenly over the micro-batches.

    A batch takes requests in the order in which they came. Where some find no place in the cache the batch ends
    earlier, rather than let later requests overtake them.

    Raises:
        BadInput: one request alone is more than the cache of a micro-batch.
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
        if not placed.left:
            parts = tuple(map(tuple, placed.micro_batches))
            return Batch(tuple(taken), new_tokens, parts, first_request, sizes.beams, sizes.prefill_chunk)
        taken = taken[: len(taken) - (len(placed.left) + 1) // 2]
    raise BadInput(
        f"a prompt of {prompts[0]} tokens and {new_tokens} new ones are more than the {sizes.cache_tokens} tokens of "
        "KV cache that a micro-batch has: lower --gen, or raise the budget"
    )


def batches_of(prompts: Sequence[int], new_tokens: int, sizes: BatchSizes) -> Iterator[Batch]:
    """Successive batches of all requests; those that one batch has no place for begin the next.

    Raises:
        BadInput: one request alone is more than the cache of a micro-batch.
    """
    first = 0
    while first < len(prompts):
        batch = batch_of(prompts[first : first + sizes.batch_size], new_tokens, sizes, first)
        yield batch
        first += len(batch.prompts)
