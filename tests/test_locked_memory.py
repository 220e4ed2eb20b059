"""Page-locked memory of the host beside a GPU: as large as the plan counts, allocated once, and unlocked at the end."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from benchmarks.shared.small_runs import (
    PAGE_LOCKED,
    THREE_TIERS,
    TWO_MEMORIES,
    Generated,
    fast_memory,
    same_bits,
)
from moesched.devices.kernels.resources import host_indices
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.torch.block_table import Growth, Held
from moesched.devices.torch.compute import Compute
from moesched.devices.torch.copies import NumberRing
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.devices.torch.kv_offload import KVOffload
from moesched.devices.torch.kv_step import KVStep
from moesched.devices.torch.locked_memory import locked_bytes
from moesched.errors import OutOfMemory
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
from odd_runs import one_batch
from test_home_pages import Allocations


@pytest.fixture
def gpu() -> Iterator[LaggingGpu]:
    with LaggingGpu() as gpu:
        yield gpu


def device_on(gpu: LaggingGpu, checkpoint: Checkpoint) -> LaggingDevice:
    return LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=gpu)


def streamed(device: LaggingDevice, policy: str) -> Generated:
    return one_batch(device, policy, weights=0.8, keep_open=True)


def caches_on_host() -> list[BlockedKV]:
    return [each for each in gc.get_objects() if type(each) is BlockedKV and each.slots.is_cpu]


def test_it_takes_whole_pages_and_no_power_of_two_and_is_unlocked_with_its_last_view(gpu: LaggingGpu) -> None:
    memory = locked_bytes(5 * 4096 - 1, GPU_DEVICE)
    assert [*gpu.pinned.registered.values()] == [5 * 4096]
    assert memory.is_pinned() and len(memory) == 5 * 4096 - 1 and memory.data_ptr() % 4096 == 0
    view = memory[4096:].view(-1)
    del memory
    assert gpu.pinned.registered
    del view
    assert not gpu.pinned.registered


@pytest.mark.parametrize("policy", ["cgopipe", "fastdecode"])
def test_slots_and_the_hosts_kv_cache_are_locked_until_the_device_closes(
    checkpoint: Checkpoint, policy: str
) -> None:
    gpu = LaggingGpu()
    of_other_tests = caches_on_host()
    device = device_on(gpu, checkpoint)
    streamed(device, policy)
    caches = [each for each in caches_on_host() if each not in of_other_tests]
    with gpu:
        assert caches and all(each.slots.is_pinned() for each in caches)
    caches.clear()
    locked = sorted(gpu.pinned.registered.values())
    streamed(device, policy)
    assert locked and sorted(gpu.pinned.registered.values()) == locked
    device.close()
    gc.collect()
    assert not gpu.pinned.registered


def test_slots_that_cannot_be_locked_end_the_run_in_one_line(checkpoint: Checkpoint) -> None:
    gpu = LaggingGpu()
    gpu.pinned.most_registered = 4096
    with pytest.raises(
        OutOfMemory, match=r"CUDA locks no .* of the host's memory \(error 2\): end other programs"
    ):
        streamed(device_on(gpu, checkpoint), "cgopipe")


def test_a_kv_cache_that_cannot_be_locked_stays_in_ordinary_memory(checkpoint: Checkpoint) -> None:
    expected = streamed(device_on(LaggingGpu(), checkpoint), "flexgen").logits_RSV
    gpu = LaggingGpu()
    gpu.pinned.most_registered = 0
    assert same_bits(streamed(device_on(gpu, checkpoint), "flexgen").logits_RSV, expected)


@pytest.mark.parametrize(
    ("blocks", "past", "slots"),
    [
        ([3, 4], 5, [range(12, 17)]),
        ([3, 5], 5, [range(12, 16), range(20, 21)]),
        ([3, 5], 4, [range(12, 16)]),
        ([6, 7, 2], 9, [range(24, 32), range(8, 9)]),
        ([6], 0, []),
    ],
)
def test_the_tokens_before_a_step_are_few_ranges_of_slots(
    blocks: list[int], past: int, slots: list[range]
) -> None:
    step = KVStep([0], [Growth(past, 1, Held(0, blocks))], 4, host_indices)
    (before,) = step.before
    assert before == slots


# -- what the plan counts --------------------------------------------------------------------------------------------


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


# -- rows, numbers and keys that host and GPU exchange ---------------------------------------------------------------


HALF = 8
"""Numbers in a half of a small ring."""


needs_kernels = pytest.mark.skipif(not instruction_sets(), reason=availability())


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("cgopipe", {}),
        ("cgopipe", {"kv_on_gpu": 0.5}),
        ("flexgen", {}),
        ("flexgen", {"kv_on_gpu": 0.5}),
        ("flexgen_cpu", {}),
        ("fastdecode", {}),
        ("twiddler", {"experts": 4}),
        ("expert_cache", {"experts": 4}),
        ("layer_split", {"gpu_layers": 1}),
        ("cpu_ffn", {}),
    ],
    ids=str,
)
def test_no_page_locked_memory_is_allocated_after_the_second_step(
    checkpoint: Checkpoint, policy: str, settings: dict[str, float]
) -> None:
    gpu = LaggingGpu(seed=2)
    allocations = Allocations(gpu)
    device = device_on(gpu, checkpoint)
    one_batch(device, policy, settings, weights=0.9, observers=[allocations])
    assert len(allocations.seen) == 1


@pytest.mark.parametrize("seed", range(4))
def test_numbers_arrive_however_often_the_halves_of_their_ring_take_turns(seed: int) -> None:
    with LaggingGpu(seed=seed) as gpu:
        ring = NumberRing(GPU_DEVICE, numbers=HALF)
        sizes = [3, 5, 1, HALF, 2, 2 * HALF + 3, 7, 1] * 3
        there = [ring.indices(range(number, number + size)) for number, size in enumerate(sizes)]
        assert all(
            each.tolist() == [*range(number, number + size)]
            for number, (each, size) in enumerate(zip(there, sizes, strict=True))
        )
        assert gpu.operations.blocked == 0
        assert gpu.pinned.allocations == 1


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_kernels)])
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels | None]:
    """The writer of keys and values to the cache."""
    if request.param == "torch":
        yield None
        return
    with closing(NativeKernels(0, threads=2)) as kernels:
        yield kernels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_new_keys_and_values_reach_the_cache_whole_in_pieces_of_any_size(
    seed: int, piece: int, kernels: NativeKernels | None
) -> None:
    with LaggingGpu(seed=seed):
        compute = Compute(str(GPU_DEVICE), layout_of(MIXTRAL, "float32"), "torch", pin=False, threads=None)
        cache = BlockedKV(MIXTRAL, 12, block_size=4, kernels=kernels)
        for sequence in range(3):
            cache.table.open(sequence)
        cache.extend([0, 1, 2], [5, 1, 3])
        step = cache.extend([2, 0], [9, 6])
        row = MIXTRAL.attention.kv_heads * MIXTRAL.attention.head_dim
        offload = KVOffload(MIXTRAL, 15, compute, piece_bytes=piece * 2 * row * 4)
        keys_TKd = torch.randn(15, MIXTRAL.attention.kv_heads, MIXTRAL.attention.head_dim)
        offload.write(cache.at(1), step, keys_TKd.to(GPU_DEVICE), (-keys_TKd).to(GPU_DEVICE))
        keys, values = cache.slots[1, :, step.slots_T]
        kept_TKd = torch.cat([keys_TKd[span.start : span.stop] for span in step.kept])
        assert keys.equal(kept_TKd)
        assert values.equal(-kept_TKd)
        compute.close()


@needs_kernels
@pytest.mark.parametrize(
    ("seed", "policy"), [*enumerate(["cgopipe", "fastdecode", "flexgen_cpu", "flexgen"])]
)
def test_native_calls_on_the_host_beside_a_gpu_give_the_tokens_of_the_cpu(
    checkpoint: Checkpoint, seed: int, policy: str
) -> None:
    layout, gpu = layout_of(MIXTRAL, "float32"), LaggingGpu(seed=seed)
    expected = one_batch(TorchDevice(checkpoint, layout, keep_logits=True), "resident")
    device = LaggingDevice(checkpoint, layout, keep_logits=True, gpu=gpu, kernel="auto")
    for _ in range(2):
        found = one_batch(device, policy, weights=0.9, keep_open=True)
        assert found.tokens == expected.tokens
        assert found.logits_RSV.allclose(expected.logits_RSV, atol=1e-5)
    device.close()
