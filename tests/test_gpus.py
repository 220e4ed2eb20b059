"""GPUs: the one of each rank, and their memory, of which plans take what is free; lack of it is one clear line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks.gpu._policies import begin_peak
from benchmarks.shared.small_runs import TWO_MEMORIES, Generated
from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.torch.cuda_device import gpu_of
from moesched.devices.torch.gpu_memory import (
    WORKSPACE_BYTES,
    let_segments_grow,
    usable_bytes,
    with_usable_memory,
)
from moesched.errors import BadInput, OutOfMemory
from moesched.models.checkpoint import Checkpoint
from moesched.seams import Observer
from moesched.tasks import Task
from odd_models import MIXTRAL, layout_of
from odd_runs import one_batch


@pytest.mark.parametrize(("rank", "ranks", "gpus", "own"), [(0, 1, 1, 0), (3, 1, 1, 0), (1, 2, 2, 1)])
def test_ranks_have_gpus_of_their_own_and_nodes_the_first_of_their_machine(
    rank: int, ranks: int, gpus: int, own: int
) -> None:
    assert gpu_of(rank, ranks, gpus) == own


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(BadInput, match="torch sees 2 CUDA devices here: lower --tensor-parallel"):
        gpu_of(2, 4, 2)


def test_a_plan_leaves_memory_to_the_libraries_of_the_gpu() -> None:
    assert usable_bytes(24 * 10**9) == 24 * 10**9 - 1_200_000_000 - 512_000_000
    with pytest.raises(BadInput, match="end other programs"):
        usable_bytes(500_000_000)


@pytest.mark.parametrize(("free", "left"), [(10**9, 438_000_000), (100 * 10**9, 10**9)])
def test_a_calibrated_machine_has_no_more_memory_than_is_free_now(free: int, left: int) -> None:
    found = with_usable_memory(TWO_MEMORIES, free)
    assert found.memories["gpu"].nbytes == left
    assert found.memories["host"] == TWO_MEMORIES.memories["host"]


def streamed(checkpoint: Checkpoint, gpu: LaggingGpu, *observers: Observer) -> Generated:
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=gpu)
    return one_batch(device, "cgopipe", weights=0.8, observers=observers)


FREE = (WORKSPACE_BYTES + 100_000) * 20 // 19


@pytest.mark.parametrize(
    ("lack", "said"),
    [
        ({"reported_free": FREE}, r"takes .* KB of the GPU, .* give --budget gpu=\d+, or end other.*"),
        ({"capacity": 300_000}, r"out of memory .*the plan takes .*: lower --budget gpu.*"),
    ],
)
def test_a_plan_or_an_allocation_beyond_the_gpu_ends_the_run_in_one_line_with_a_budget(
    checkpoint: Checkpoint, lack: dict[str, Any], said: str
) -> None:
    with pytest.raises(OutOfMemory) as caught:
        streamed(checkpoint, LaggingGpu(**lack))
    assert re.fullmatch(f".*{said}", str(caught.value))
    assert streamed(checkpoint, LaggingGpu(reported_free=FREE + 10**6)).tokens


@dataclass
class FillsUp:
    """An observer at which other programs take what is free of a GPU when a task has run.

    Attributes:
        after: the task's verb.
    """

    gpu: LaggingGpu
    after: str

    def ended(self, task: Task) -> None:
        if task.verb == self.after:
            self.gpu.memory.capacity = 1


@pytest.mark.parametrize("after", ["load", "sample"])
def test_a_gpu_that_other_programs_fill_during_a_run_ends_it_in_one_line(
    checkpoint: Checkpoint, after: str
) -> None:
    said = r"out of memory \(cuda out of memory\): the plan takes .* of gpu: lower --budget gpu=.*nvidia-smi lists"
    gpu = LaggingGpu(seed=1)
    with pytest.raises(OutOfMemory) as caught:
        streamed(checkpoint, gpu, FillsUp(gpu, after))
    assert re.fullmatch(said, str(caught.value))


@pytest.fixture
def allocator() -> Iterator[None]:
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_segments_of_the_allocator_grow_unless_the_user_has_set_it(allocator: None) -> None:
    let_segments_grow({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"})
    let_segments_grow({})
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch takes the settings of its allocator, and does not tell them")
    assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    let_segments_grow({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"})
    assert "expandable_segments:False" in torch._C._accelerator_getAllocatorSettings()


def test_a_peak_that_begins_anew_counts_nothing_that_the_case_before_left(checkpoint: Checkpoint) -> None:
    gpu = LaggingGpu()
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=gpu)
    one_batch(device, "resident", keep_open=True)
    assert gpu.memory.in_use() > sum(page.nbytes for page in device.layout.pages)
    device.close()
    begin_peak(torch.get_device_module(GPU_DEVICE))
    assert gpu.memory.most_taken < 4096
