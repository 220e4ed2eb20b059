"""The page-locked memory of the host beside a GPU, byte for byte what the plan counts."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.shared.small_runs import PAGE_LOCKED, THREE_TIERS, TWO_MEMORIES, fast_memory
from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.host_buffers import in_pages
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan
from moesched.tasks import Task
from odd_models import MIXTRAL, PROMPTS, layout_of

pytestmark = pytest.mark.usefixtures("small_heap")

BUFFERS = {
    "rows exchanged with the accelerator",
    "new keys and values on their way to the host",
    "numbers on their way to the accelerator",
    "ring that weights pass through",
}


@pytest.mark.parametrize(
    ("policy", "machine", "buffers"),
    [
        ("cgopipe", PAGE_LOCKED, 3),
        ("cgopipe", TWO_MEMORIES, 4),
        ("flexgen_cpu", PAGE_LOCKED, 3),
        ("twiddler", PAGE_LOCKED, 2),
        ("cpu_ffn", TWO_MEMORIES, 3),
        ("three_tiers", THREE_TIERS, 4),
        ("layer_streaming", PAGE_LOCKED, 1),
    ],
    ids=lambda each: each.name if isinstance(each, Machine) else str(each),
)
def test_all_page_locked_memory_of_a_batch_is_in_its_plan(
    checkpoint: Checkpoint, policy: str, machine: Machine, buffers: int
) -> None:
    layout, gpu = layout_of(MIXTRAL, "float32"), LaggingGpu()
    device = LaggingDevice(checkpoint, layout, map_files=False, gpu=gpu)
    batch = split_batch([len(prompt) for prompt in PROMPTS], 4, 2)
    made, budgets = make_policy(policy, {}), fast_memory(device, machine, batch, weights=0.9)
    plan = plan_run(machine, layout, batch, made, budgets, device.slot_bytes)
    locked = Locked(gpu)
    run(plan, made, device, PROMPTS, observers=[locked], keep_open=True)
    reserved = plan.reservations.of(plan.declared)
    counted = Counter(each.nbytes for each in reserved if each.what in BUFFERS and each.nbytes)
    assert counted.total() == buffers
    assert counted <= locked.sizes
    beside = (locked.sizes - counted).elements()
    kv = sum(in_pages(each.nbytes) for each in reserved if each.content == "KV cache")
    assert sum(beside) == weights_locked(plan) + (kv if plan.kv.held_by("host") else 0)
    device.close()


class Locked:
    """The sizes of all page-locked memory in the second step."""

    def __init__(self, gpu: LaggingGpu) -> None:
        self._gpu = gpu
        self.sizes: Counter[int] = Counter()

    def ended(self, task: Task) -> None:
        if task.step == 2 and not self.sizes:
            self.sizes = Counter(self._gpu.pinned.registered.values())


def weights_locked(plan: Plan) -> int:
    """Bytes of the pools of the host, and of the pages at home in registered memory."""
    fast = plan.memory("accelerator")
    pools = sum(in_pages(pool.nbytes) for pool in plan.weights.pools if pool.memory is not fast)
    if plan.machine.roles.pinned:
        return pools
    staying = {page.id for kept in plan.weights.resident for page in kept.pages() if kept.memory is fast}
    return pools + sum(plan.slot_bytes(page) for page in plan.layout.pages if page.id not in staying)
