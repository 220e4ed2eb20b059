"""Sizes that nobody gave: the largest batch that a policy's plan fits the budgets with, and its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesched.batching import Sizes, batch_of, batches_of
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.plan import Batch

LARGEST_MICRO_BATCH = 32
MICRO_BATCHES_TO_OVERLAP = 4
HALVINGS = 2

Try = Callable[[Batch], object]
"""Plans a batch, and raises BadInput where that does not fit."""


def choose_sizes(
    prompts: Sequence[int],
    new_tokens: int,
    machine: Machine,
    plan: Try,
    *,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
) -> Sizes:
    """What is given, and what fits where nothing is.

    The batch is the largest up to all prompts with which every batch fits; the longest prompts are tried together
    first. It assumes that with fewer prompts a plan needs no more bytes.

    Args:
        prompts: prompt lengths in tokens.

    Raises:
        BadInput: a given size is below 1, or not even one prompt fits.
    """
    for option, size in (("--batch-size", batch_size), ("--micro-batch-size", micro_batch_size)):
        if size is not None and size < 1:
            raise BadInput(f"{option} is {size}: give 1 or more")
    longest_first = sorted(prompts, reverse=True)

    searched = batch_size is None

    def micro_batches(batch_size: int) -> list[int]:
        """Sizes to try, the best first. A larger batch is worth smaller micro-batches, but not ever smaller ones."""
        if micro_batch_size is not None:
            return [min(micro_batch_size, batch_size)]
        sizes = _halvings(default_micro_batch(machine, batch_size))
        return sizes[: HALVINGS + 1] if searched else sizes

    def fits(batch: Batch) -> bool:
        try:
            plan(batch)
        except BadInput:
            return False
        return True

    def fit(batch_size: int) -> int | None:
        """The first size of micro-batches with which that many of the longest prompts fit."""
        tried = (
            (size, batch_of(longest_first, new_tokens, Sizes(batch_size, size)))
            for size in micro_batches(batch_size)
        )
        return next((size for size, batch in tried if fits(batch)), None)

    if batch_size is None:
        batch_size = _largest(len(prompts), lambda size: fit(size) is not None)
    batch_size = min(batch_size, len(prompts))
    sizes = Sizes(batch_size, fit(batch_size) or micro_batches(batch_size)[-1])
    while searched and sizes.batch_size > 1 and not all(map(fits, batches_of(prompts, new_tokens, sizes))):
        # Shorter prompts may spread less evenly than the longest did.
        sizes = Sizes(sizes.batch_size - 1, min(sizes.micro_batch_size, sizes.batch_size - 1))
    return sizes


def default_micro_batch(machine: Machine, batch_size: int) -> int:
    """The requests of a micro-batch.

    Where accelerator and host share a memory nothing is copied between them, and one micro-batch reads the weights
    once. Elsewhere several overlap: one computes while others are copied or attend on the host.
    """
    if machine.unified:
        return batch_size
    return min(LARGEST_MICRO_BATCH, -(-batch_size // MICRO_BATCHES_TO_OVERLAP))


def _halvings(size: int) -> list[int]:
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, at least 1, where all below one that fits do so too."""
    if fits(limit):
        return limit
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
