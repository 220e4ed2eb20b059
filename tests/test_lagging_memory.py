"""Memory and places of imitated GPUs: segments as torch's allocator has them, and nothing from one GPU on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from moesched.devices.lagging.device import GPU_DEVICE, LaggingGpu
from moesched.devices.lagging.segments import LARGE_SEGMENT, ROUNDING, SMALL_SEGMENT
from moesched.devices.lagging.tensors import DEVICE_TYPE
from moesched.devices.shared.arena import aligned_bytes

MB = 1 << 20
SECOND = torch.device(DEVICE_TYPE, 1)


def memory_of(nbytes: int, device: torch.device = GPU_DEVICE) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("nbytes", "taken", "reserved"),
    [
        (1, ROUNDING, SMALL_SEGMENT),
        (MB, MB, SMALL_SEGMENT),
        (MB + 1, MB + ROUNDING, LARGE_SEGMENT),
        (10 * MB, 10 * MB, 10 * MB),
        (11 * MB + 1, 12 * MB, 12 * MB),
    ],
)
def test_blocks_and_segments_are_rounded_up(nbytes: int, taken: int, reserved: int) -> None:
    with LaggingGpu() as gpu:
        held = memory_of(nbytes)
        assert (gpu.memory.wanted, gpu.memory.taken, gpu.memory.reserved) == (nbytes, taken, reserved)
        del held
        assert gpu.memory.in_use() == 0
        assert gpu.memory.reserved == reserved


def test_what_is_freed_goes_to_the_next_tensor_of_its_stream_and_to_no_other() -> None:
    with LaggingGpu() as gpu:
        freed = memory_of(1000)
        place = freed.data_ptr()
        del freed
        with gpu.streams.on(gpu.streams.new_stream()):
            elsewhere = memory_of(1000)
        again = memory_of(1000)
        assert again.data_ptr() == place != elsewhere.data_ptr()


def test_freed_neighbours_are_one_piece() -> None:
    with LaggingGpu() as gpu:
        parts = [memory_of(MB // 2) for _ in range(4)]
        assert gpu.memory.reserved == SMALL_SEGMENT
        del parts
        whole = [memory_of(MB), memory_of(MB)]
        assert gpu.memory.in_use() == sum(each.nbytes for each in whole)
        assert gpu.memory.reserved == SMALL_SEGMENT


def test_a_gpu_is_full_by_its_segments_of_which_unused_ones_are_freed_first() -> None:
    with LaggingGpu(capacity=40 * MB) as gpu:
        unused = memory_of(30 * MB)
        del unused
        held = memory_of(32 * MB)
        assert gpu.memory.reserved == held.nbytes
        with pytest.raises(torch.OutOfMemoryError):
            memory_of(MB + 1)


def test_nothing_from_one_gpu_is_used_on_another() -> None:
    with LaggingGpu(count=2) as gpu:
        one, other = (torch.ones(3, device=device) for device in (GPU_DEVICE, SECOND))
        assert other.device == SECOND
        assert [memory.in_use() for memory in gpu.memories] == [ROUNDING, ROUNDING]
        with pytest.raises(RuntimeError, match="same device"):
            one.add(other)
        module = torch.get_device_module(DEVICE_TYPE)
        first, second = (module.Event(enable_timing=True) for _ in range(2))
        for event, device in ((first, GPU_DEVICE), (second, SECOND)):
            event.record(module.Stream(device))
            event.synchronize()
        with pytest.raises(RuntimeError, match="same GPU"):
            first.elapsed_time(second)
        with pytest.raises(RuntimeError, match="recorded on GPU 1"):
            first.record(module.Stream(SECOND))


@pytest.fixture
def gpu() -> Iterator[LaggingGpu]:
    with LaggingGpu(seed=1) as gpu:
        yield gpu


def registered(gpu: LaggingGpu, nbytes: int = 2 * 4096) -> torch.Tensor:
    memory = aligned_bytes(nbytes)
    assert gpu.pinned.cudaHostRegister(memory.data_ptr(), nbytes, 1) == 0
    return memory


def test_memory_is_registered_once_and_unregistered_once(gpu: LaggingGpu) -> None:
    memory = registered(gpu)
    assert gpu.pinned.cudaHostRegister(memory.data_ptr() + 4096, 4096, 1) == 712
    assert gpu.pinned.cudaHostUnregister(memory.data_ptr()) == 0
    assert gpu.pinned.faults == []
    assert gpu.pinned.cudaHostUnregister(memory.data_ptr()) == 713
    assert len(gpu.pinned.faults) == 1


def test_a_tensor_is_locked_if_all_of_it_is_registered_and_a_part_of_it_is_refused(gpu: LaggingGpu) -> None:
    memory = aligned_bytes(4 * 4096)
    assert gpu.pinned.cudaHostRegister(memory.data_ptr() + 4096, 4096, 1) == 0
    assert memory[4096 : 2 * 4096].is_pinned()
    assert not memory[:4096].is_pinned()
    with pytest.raises(RuntimeError, match="a part of a copy is in page-locked memory"):
        memory_of(8192).copy_(memory[4096 : 3 * 4096], non_blocking=True)


def test_locked_memory_is_read_when_the_stream_comes_to_it_and_other_memory_at_once(gpu: LaggingGpu) -> None:
    locked, ordinary = registered(gpu), aligned_bytes(8192)
    with gpu.streams.on(stream := gpu.streams.new_stream()):
        stream.eagerness = 0.0
        late, early = memory_of(8192), memory_of(8192)
        late.copy_(locked, non_blocking=True)
        early.copy_(ordinary, non_blocking=True)
        locked.fill_(1)
        ordinary.fill_(1)
        assert (late.cpu() == 1).all()
        assert (early.cpu() == 0).all()
    assert gpu.operations.blocked == 1


def test_memory_that_is_unregistered_before_its_copy_is_a_fault_and_an_error_of_the_gpu(
    gpu: LaggingGpu,
) -> None:
    memory = registered(gpu)
    with gpu.streams.on(stream := gpu.streams.new_stream()):
        stream.eagerness = 0.0
        target = memory_of(8192)
        target.copy_(memory, non_blocking=True)
        gpu.pinned.cudaHostUnregister(memory.data_ptr())
        assert len(gpu.pinned.faults) == 1
        with pytest.raises(RuntimeError, match="is locked no longer"):
            target.cpu()


@pytest.mark.parametrize(
    "write",
    [lambda x: x.add_(1), lambda x: x.copy_(torch.ones(3, device=GPU_DEVICE)), lambda x: x[:2].zero_()],
)
def test_memory_of_inference_mode_is_written_to_in_that_mode_alone(
    write: Callable[[torch.Tensor], object],
) -> None:
    with LaggingGpu():
        ordinary = torch.zeros(3, device=GPU_DEVICE)
        with torch.inference_mode():
            inferred = torch.zeros(3, device=GPU_DEVICE)
            write(inferred)
            write(ordinary)
        write(ordinary)
        with pytest.raises(RuntimeError, match="outside InferenceMode"):
            write(inferred)
