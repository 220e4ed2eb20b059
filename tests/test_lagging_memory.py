"""Memory and places of imitated GPUs: segments as torch's allocator has them, and nothing from one GPU on another."""

from __future__ import annotations

import pytest
import torch

from moesched.devices.lagging.device import GPU_DEVICE, LaggingGpu
from moesched.devices.lagging.segments import LARGE_SEGMENT, ROUNDING, SMALL_SEGMENT
from moesched.devices.lagging.tensors import DEVICE_TYPE

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
