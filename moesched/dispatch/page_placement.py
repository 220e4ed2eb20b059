"""What stays in fast memory: KV caches, and pages beside a buffer that the others stream through."""

from __future__ import annotations

from collections.abc import Callable

from moesched.errors import BadInput
from moesched.models.layout import Page
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan


def split_kv(plan: Plan, on_gpu: float) -> None:
    """Place the KV cache of that share of the micro-batches in fast memory, that of the others on the host.

    Those in fast memory lie as evenly as they can among the others, so that neither processor attends to many in a row.

    Raises:
        BadInput: that is no share.
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
