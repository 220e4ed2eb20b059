"""Page-locked memory: what a GPU copies from by itself, as large as it was asked for, and unlocked at the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks.shared.small_runs import Generated, same_bits
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.torch.copies import host_indices
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.devices.torch.kv_step import KVStep
from moesched.devices.torch.locked_memory import locked_bytes
from moesched.errors import OutOfMemory
from moesched.models.checkpoint import Checkpoint
from odd_models import MIXTRAL, layout_of
from odd_runs import generated

pytestmark = pytest.mark.usefixtures("small_heap")


@pytest.fixture
def gpu() -> Iterator[LaggingGpu]:
    with LaggingGpu() as gpu:
        yield gpu


def device_on(gpu: LaggingGpu, checkpoint: Checkpoint) -> LaggingDevice:
    return LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=gpu)


def streamed(device: LaggingDevice, policy: str) -> Generated:
    return generated(device, policy, weights=0.8, keep_open=True)


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
    step = KVStep((0,), (past,), (1,), [blocks], 4, host_indices)
    (part,) = step.parts
    assert [each for each in step.past_slots(part)[0] if each] == slots
