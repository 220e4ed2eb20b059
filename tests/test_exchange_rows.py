"""Rows that host and GPU exchange pass page-locked memory that is allocated once, and arrive whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from benchmarks.shared.small_runs import TWO_MEMORIES, generate
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.torch.compute import Compute
from moesched.devices.torch.copies import NumberRing
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.devices.torch.kv_offload import KVOffload
from moesched.models.checkpoint import Checkpoint
from moesched.plugins import make_policy
from moesched.tasks import Task
from odd_models import MIXTRAL, PROMPTS, layout_of
from odd_runs import generated

pytestmark = pytest.mark.usefixtures("small_heap")

HALF = 8
"""Numbers in a half of a small ring."""

needs_kernels = pytest.mark.skipif(not instruction_sets(), reason=availability())


class Allocations:
    """Counts allocations of page-locked memory after the second step."""

    def __init__(self, gpu: LaggingGpu) -> None:
        self._gpu = gpu
        self._before: int | None = None

    def ended(self, task: Task) -> None:
        if task.step == 2 and self._before is None:
            self._before = self._gpu.pinned.allocations

    @property
    def late(self) -> int:
        assert self._before is not None, "the run has a third step"
        return self._gpu.pinned.allocations - self._before


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
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=gpu)
    generate(
        device,
        make_policy(policy, settings),
        TWO_MEMORIES,
        PROMPTS,
        new_tokens=5,
        micro_batch_size=2,
        weights=0.9,
        observers=[allocations],
    )
    assert allocations.late == 0


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
        assert keys.equal(keys_TKd)
        assert values.equal(-keys_TKd)
        compute.close()


@needs_kernels
@pytest.mark.parametrize(
    ("seed", "policy"), [*enumerate(["cgopipe", "fastdecode", "flexgen_cpu", "flexgen"])]
)
def test_native_calls_on_the_host_beside_a_gpu_give_the_tokens_of_the_cpu(
    checkpoint: Checkpoint, seed: int, policy: str
) -> None:
    layout, gpu = layout_of(MIXTRAL, "float32"), LaggingGpu(seed=seed)
    expected = generated(TorchDevice(checkpoint, layout, keep_logits=True), "resident")
    device = LaggingDevice(checkpoint, layout, keep_logits=True, gpu=gpu, kernel="auto")
    for _ in range(2):
        found = generated(device, policy, weights=0.9, keep_open=True)
        assert found.tokens == expected.tokens
        assert found.logits_RSV.allclose(expected.logits_RSV, atol=1e-5)
    device.close()
