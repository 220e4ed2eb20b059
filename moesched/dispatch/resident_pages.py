"""Divides weight pages: some stay on the accelerator, all others stream through a buffer there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from moesched.models.layout import Page
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan


def double_buffered(plan: Plan, stage: int = 0) -> tuple[list[list[Page]], Pool]:
    """Keep on the accelerator as many pages as fit beside a buffer for the streamed pages of two layers.

    stage: pipeline stage whose layers are placed.

    Returns:
        Two values: a list with each layer's pages that stream, and the buffer.
    """
    streamed = keep_beside_buffer(plan, lambda streamed: 2 * streamed, stage)
    slots = 2 * max(map(len, streamed))
    return streamed, plan.pool(
        "accelerator", "weights", slots, [page for pages in streamed for page in pages]
    )


def keep_beside_buffer(plan: Plan, slots: Callable[[int], int], stage: int = 0) -> list[list[Page]]:
    """Keep on the accelerator as many pages as fit beside a buffer, through which all other pages stream.

    A layer's dense pages (weights that every token needs) are kept before its experts. All layers stream the same
    number of pages, give or take one, so that no layer waits longer for its weights than the others.

    Args:
        slots: function from the number of pages that each layer streams to the number of slots of the buffer.
        stage: pipeline stage whose layers are placed.

    Returns:
        For each layer, the pages that stream.
    """
    free = plan.free("accelerator", stage)
    per_layer = [plan.layout.layer(i) for i in plan.stages[stage]]
    ends = [[0, *accumulate(map(plan.slot_bytes, pages))] for pages in per_layer]
    most = max(map(len, per_layer))
    largest = max(map(plan.slot_bytes, plan.layout.pages))
    for streamed in range(most + 1):
        left = free - slots(streamed) * largest - sum(end[max(0, len(end) - 1 - streamed)] for end in ends)
        if left >= 0 or streamed == most:
            break
    resident = [page for pages in per_layer for page in pages[: max(0, len(pages) - streamed)]]
    for pages in per_layer:
        extra = pages[len(pages) - streamed :][:1] if streamed <= len(pages) else ()
        if extra and plan.slot_bytes(extra[0]) <= left:
            resident += extra
            left -= plan.slot_bytes(extra[0])
    stays = {page.id for page in resident}
    plan.keep(resident)
    return [[page for page in pages if page.id not in stays] for pages in per_layer]
