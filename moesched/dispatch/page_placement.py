"""Resident pages: those kept on the accelerator beside a buffer that the others stream through."""

from __future__ import annotations

from collections.abc import Callable

from moesched.errors import BadInput
from moesched.models.layout import Page
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan


def split_kv(plan: Plan, on_gpu: float) -> None:
    """Place the KV caches of a share of the micro-batches on the accelerator, and those of the others on the host.

    The two kinds alternate as evenly as possible, so that neither processor gets long runs of attention.

    on_gpu: the share, from 0 to 1.

    Raises:
        BadInput: the share is out of range.
    """
    if not 0 <= on_gpu <= 1:
        raise BadInput(
            f"kv_on_gpu is {on_gpu:g}: give the share of the KV cache on the accelerator, from 0 to 1"
        )
    count = len(plan.micro_batches)
    here = round(on_gpu * count)
    resident = [j for j in plan.micro_batches if (j + 1) * here // count > j * here // count]
    plan.place_kv("accelerator", resident)
    plan.place_kv("host", set(plan.micro_batches) - set(resident))


def double_buffered(plan: Plan, stage: int = 0) -> tuple[list[list[Page]], Pool]:
    """Keep the pages that fit beside a double buffer for the others.

    Returns the streamed pages by layer, and the buffer.

    stage: pipeline stage whose layers are placed.
    """
    streamed = keep_beside_buffer(plan, lambda streamed: 2 * streamed, stage)
    slots = 2 * max(map(len, streamed))
    return streamed, plan.pool(
        "accelerator", "weights", slots, [page for pages in streamed for page in pages]
    )


def keep_beside_buffer(plan: Plan, slots: Callable[[int], int], stage: int = 0) -> list[list[Page]]:
    """Keep the pages that fit beside the buffer; returns the streamed pages by layer.

    A layer's dense pages are kept before its experts. Layers stream equally many pages, give or take one, so that no
    layer waits longer for its weights than the others.

    slots: number of slots of the buffer, given the number of pages that stream per layer.
    stage: pipeline stage whose layers are placed.
    """
    free = plan.free("accelerator", stage)
    per_layer = [plan.layout.layer(i) for i in plan.stages[stage]]
    count = len(per_layer[0])
    largest = max(map(plan.slot_bytes, plan.layout.pages))
    for streamed in range(count + 1):
        buffer = slots(streamed) * largest
        resident = [page for pages in per_layer for page in pages[: count - streamed]]
        left = free - buffer - sum(map(plan.slot_bytes, resident))
        if left >= 0 or streamed == count:
            break
    for pages in per_layer:
        extra = pages[count - streamed : count - streamed + 1]
        if extra and plan.slot_bytes(extra[0]) <= left:
            resident += extra
            left -= plan.slot_bytes(extra[0])
    stays = {page.id for page in resident}
    plan.keep(resident)
    return [[page for page in pages if page.id not in stays] for pages in per_layer]
