"""Which pages stay in fast memory beside a buffer that the others stream through."""

from __future__ import annotations

from collections.abc import Callable

from moesched.memory import Pool
from moesched.models.layout import Page
from moesched.plan import Plan


def double_buffered(plan: Plan, stage: int = 0) -> tuple[list[list[Page]], Pool]:
    """Keep what fits beside a buffer of two layers' streamed pages; returns those pages, by layer, and the buffer.

    stage: of a pipeline; only its layers count.
    """
    streamed = keep_beside_buffer(plan, lambda streamed: 2 * streamed, stage)
    slots = 2 * max(map(len, streamed))
    return streamed, plan.pool(
        "accelerator", "weights", slots, [page for pages in streamed for page in pages]
    )


def keep_beside_buffer(plan: Plan, slots: Callable[[int], int], stage: int = 0) -> list[list[Page]]:
    """Keep what fits beside the buffer; returns the pages that stream, by layer.

    A layer's dense part is kept before its experts, and layers stream as evenly as they can, so that no
    layer waits longer for its weights than the others.

    slots: how many the buffer needs if so many pages of a layer stream.
    stage: of a pipeline; only its layers count.
    """
    free = plan.free("accelerator", stage)
    per_layer = [plan.layout.layer(i) for i in plan.stages[stage]]
    count = len(per_layer[0])
    largest = max(map(plan.slot_bytes, plan.layout.pages))
    for streamed in range(count + 1):
        buffer = slots(streamed) * largest
        kept = [page for pages in per_layer for page in pages[: count - streamed]]
        left = free - buffer - sum(map(plan.slot_bytes, kept))
        if left >= 0 or streamed == count:
            break
    for pages in per_layer:
        extra = pages[count - streamed : count - streamed + 1]
        if extra and plan.slot_bytes(extra[0]) <= left:
            kept += extra
            left -= plan.slot_bytes(extra[0])
    stays = {page.id for page in kept}
    plan.keep(kept)
    return [[page for page in pages if page.id not in stays] for pages in per_layer]
