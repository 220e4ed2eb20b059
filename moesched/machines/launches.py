"""Counts the launches of `Work` on a processor: of its kernels one by one, or of the replay of a graph of kernels."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.models.footprint import KEPT_ROWS
from moesched.work import Work, WorkPart

GROUPED = ("experts", "resident experts")
EXPERTS = ("expert", "cached expert", "resident expert", *GROUPED)
ONLY_MOVING = ("combine", "embed")

KERNELS_OF_A_PRODUCT, KERNELS_OF_EXPERTS, KERNELS_OF_ATTENTION = 3, 5, 2
"""Number of kernels of a product with norm and activation, of one expert or several grouped ones, and of attention."""

IN_GRAPHS = {"embed": 1, "pre_attention": 2, "attention": 2, "post_attention": 6, "sample": 3}
"""Number of Triton kernels of each kind of work whose kernels form one graph.

The replay of such a graph is one launch, or is part of the launch of a whole step.
"""
ONE_BY_ONE = {"route": 6, "preview_route": 2, "combine": 1}
"""Number of launches of each kind of work that has launches besides the replay of one graph.

`route` replays two graphs, and sorts the rows of experts by four kernels.
"""
OF_AN_EXPERT = 2
"""Number of launches of one expert, and of all kinds of work that are not listed above."""
OF_PROMPTS = "attention prompt"
"""Operation that takes one kernel more than other attention, as two kernels store its keys and values."""


def launches(work: Work, *, replays: bool) -> float:
    """Return the number of launches of `work`; the replay of a graph of kernels is one launch.

    Args:
        replays: whether the processor replays graphs, as device cuda does with kernels in Triton.
    """
    return _with_graphs(work) if replays else kernels(work.parts)


def kernels(parts: Iterable[WorkPart]) -> float:
    """Return the number of kernels that compute `parts`; it may be a fraction, since `parts` may be means.

    For an operation in `GROUPED`, one call computes all experts, however many rows each of them has.
    """
    grouped = dict.fromkeys(GROUPED, 0.0)
    count = 0.0
    for part in parts:
        if part.operation in GROUPED:
            grouped[part.operation] += part.times
        elif is_product(part):
            count += part.times * (KERNELS_OF_EXPERTS if part.operation in EXPERTS else KERNELS_OF_A_PRODUCT)
        else:
            count += KERNELS_OF_ATTENTION if is_attention(part) else 1.0
    return count + sum(KERNELS_OF_EXPERTS * min(1.0, experts) for experts in grouped.values())


def is_attention(part: WorkPart) -> bool:
    """Test whether `part` is attention itself, not a projection before or after it."""
    return "attention" in part.operation.split()


def is_product(part: WorkPart) -> bool:
    """Test whether `part` multiplies rows with weights."""
    return part.size > 0 and part.operation not in ONLY_MOVING and not is_attention(part)


def _with_graphs(work: Work) -> float:
    if work.kind in IN_GRAPHS:
        if work.tokens <= KEPT_ROWS:
            return 0.0 if work.joins else 1.0
        return IN_GRAPHS[work.kind] + any(part.operation == OF_PROMPTS for part in work.parts)
    return ONE_BY_ONE.get(work.kind, OF_AN_EXPERT)
