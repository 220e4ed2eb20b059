"""Places KV caches on accelerator and host, and runs attention on the processor whose memory has the cache.

The Twiddler paper keeps the whole KV cache on the GPU, which limits the context (section 5). Here the CPU computes
decode attention over keys and values on the host, which are not copied to the GPU. Prefill attention always runs on
the GPU.
"""

from __future__ import annotations

from moesched.dispatch.expert_placement import keep_dense
from moesched.errors import BadInput
from moesched.steps.plan import Plan
from moesched.steps.step import Step


def split_kv(plan: Plan, on_gpu: float) -> None:
    """Place the KV caches of a share of the micro-batches on the accelerator, and the others on the host.

    Micro-batches of both kinds alternate as evenly as possible, so that neither processor gets long runs of attention.
    If there is only one micro-batch, the layers of its cache are divided in this way instead.

    on_gpu: the share of micro-batches, or layers, on the accelerator, from 0 to 1.

    Raises:
        BadInput: the share is out of range.
    """
    if not 0 <= on_gpu <= 1:
        raise BadInput(
            f"kv_on_gpu is {on_gpu:g}: give the share of the KV cache on the accelerator, from 0 to 1"
        )
    if _by_layers(plan):
        _place_layers(plan, evenly(len(plan.layers), round(on_gpu * len(plan.layers))))
        return
    count = len(plan.micro_batches)
    resident = evenly(count, round(on_gpu * count))
    plan.place_kv("accelerator", resident)
    plan.place_kv("host", set(plan.micro_batches) - set(resident))


def evenly(count: int, chosen: int) -> list[int]:
    """Return `chosen` of the numbers from 0 to `count` - 1, spread as evenly as possible."""
    return [number for number in range(count) if (number + 1) * chosen // count > number * chosen // count]


def _by_layers(plan: Plan) -> bool:
    """Test whether layers rather than micro-batches are divided between accelerator and host.

    Layers are divided if there is a single micro-batch, a single pipeline stage and no beam search.
    """
    return len(plan.micro_batches) == 1 and len(plan.stages) == 1 and plan.batch.beams == 1


def _place_layers(plan: Plan, here: list[int]) -> None:
    plan.place_kv("accelerator", layers=here)
    plan.place_kv("host", layers=set(plan.layers) - set(here))


def place_kv_that_fits(plan: Plan, experts: int) -> None:
    """Place the KV caches of as many micro-batches as fit on the accelerator, and the others on the host.

    If there is only one micro-batch and its cache does not fit, as many layers of the cache as fit are placed.

    experts: number of experts to leave room for on the accelerator, in addition to the dense weights.
    """
    if plan.machine.unified:
        plan.place_kv("accelerator")
        return
    pages = [page for i in plan.layers for page in plan.layout.dense(i)]
    expert = len(plan.layout.an_expert) * max(map(plan.slot_bytes, plan.layout.pages))
    rows = max(sum(chunk.tokens) for chunk in plan.chunks.values())
    on_the_way = max(rows, plan.batch.sequences(plan.batch.prompts)) * plan.operations.hidden_bytes
    beside = sum(map(plan.slot_bytes, pages)) + experts * expert + on_the_way
    here = _fitting(plan, beside)
    if not here and _by_layers(plan):
        _place_layers(plan, _fitting_layers(plan, beside))
        return
    plan.place_kv("accelerator", here)
    plan.place_kv("host", set(plan.micro_batches) - set(here))


def place_kv_and_dense(plan: Plan, experts: int) -> None:
    """Place the KV caches that fit on the accelerator, and keep the dense weights there; other caches go to the host.

    experts: number of experts to leave room for on the accelerator, in addition to caches and dense weights.
    """
    place_kv_that_fits(plan, experts)
    keep_dense(plan)


def _fitting(plan: Plan, beside: int) -> list[int]:
    """Return the first micro-batches whose KV caches fit in the memory that the plan has left on each accelerator.

    beside: further bytes to keep free on each accelerator, for later declarations.
    """
    sizes = plan.reservations.sizes
    left = min(plan.free("accelerator", stage) for stage in range(len(plan.stages)))
    left -= beside + sizes.device_kv(plan.micro_batches)
    fitting = []
    for number in plan.micro_batches:
        cache = max(plan.reservations.cache_bytes([number], layers) for layers in plan.stages)
        left += sizes.device_kv([number]) - cache
        if left < 0:
            break
        fitting.append(number)
    return fitting


def _fitting_layers(plan: Plan, beside: int) -> list[int]:
    """Return the layers whose KV caches the accelerator holds: as many as fit, spread evenly over the model.

    For a plan with a single micro-batch, whose whole cache does not fit.

    beside: bytes to keep free on the accelerator.
    """
    left = plan.free("accelerator") - beside - plan.reservations.sizes.device_kv(plan.micro_batches)
    sizes = [plan.reservations.cache_bytes(plan.micro_batches, [layer]) for layer in plan.layers]
    for count in reversed(plan.layers):
        here = evenly(len(sizes), count)
        if sum(sizes[layer] for layer in here) <= left:
            return here
    return []


def attend(step: Step, i: int, j: int) -> None:
    """Submit attention of micro-batch j in layer i on the processor whose memory has the micro-batch's KV cache.

    In prefill, attention always runs on the accelerator.
    """
    if step.phase(j) == "prefill" or step.kv_on_accelerator(j, i):
        attend_on_accelerator(step, i, j)
    else:
        step.offload_qkv(i, j)
        step.cpu_attention(i, j)
        step.load_hidden(i, j)


def attend_on_accelerator(step: Step, i: int, j: int) -> None:
    """Submit attention of micro-batch j in layer i on the accelerator.

    If the micro-batch's KV cache is on the host, new keys and values are copied there. In decode, the caller has to
    submit `load_kv` before it calls this function.
    """
    step.attention(i, j)
    if not step.kv_on_accelerator(j, i):
        step.offload_kv(i, j)
