"""CUDA's streams, imitated: edges hold whatever runs first, and times stay on the host's clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from moesched.devices.lagging.device import GPU_DEVICE, LaggingGpu
from moesched.devices.torch.cuda_streams import CudaStreams
from moesched.devices.torch.stream_clock import PERIOD, StreamClock
from moesched.tasks import Kernel, Lane, Task, Work

LANES = [Lane("a"), Lane("b")]


@pytest.fixture(params=range(5))
def gpu(request: pytest.FixtureRequest) -> Iterator[LaggingGpu]:
    with LaggingGpu(seed=request.param) as gpu:
        yield gpu


def tasks() -> Iterator[Task]:
    return (Kernel(LANES[number % 2], Work("add", "gpu"), "add", id=number) for number in count())


def test_an_edge_may_be_asked_for_thousands_of_tasks_later(gpu: LaggingGpu) -> None:
    streams = CudaStreams(GPU_DEVICE, ("a", "b"), lambda task: None)
    numbered = tasks()
    first = next(numbered)
    streams.issue(first, [])
    for _ in range(5000):
        streams.issue(next(numbered), [])
    streams.issue(next(numbered), [first]).wait()


def test_a_task_waits_for_one_on_another_stream(gpu: LaggingGpu) -> None:
    ran: list[int] = []
    streams = CudaStreams(
        GPU_DEVICE, ("a", "b"), lambda task: gpu.streams.current.enqueue(lambda: ran.append(task.id))
    )
    numbered = tasks()
    before: list[Task] = []
    for _ in range(100):
        task = next(numbered)
        last = streams.issue(task, before)
        before = [task]
    last.wait()
    assert ran == sorted(ran) and len(ran) == 100


def test_a_task_whose_times_were_read_is_forgotten_and_counts_as_ended(gpu: LaggingGpu) -> None:
    streams = CudaStreams(GPU_DEVICE, ("a", "b"), lambda task: None)
    numbered = tasks()
    first = next(numbered)
    issued = streams.issue(first, [])
    issued.wait()
    start, end = issued.span()
    assert start <= end
    streams.issue(next(numbered), [first]).wait()


def test_threads_that_wait_for_a_task_leave_their_core(gpu: LaggingGpu) -> None:
    issued = CudaStreams(GPU_DEVICE, ("a",), lambda task: None).issue(next(tasks()), [])
    assert issued.end.blocking  # type: ignore[attr-defined]  # torch's events do not tell


def test_times_of_ten_minutes_follow_a_clock_that_drifts() -> None:
    now = [10**12]

    def clock() -> int:
        now[0] += 1000
        return now[0]

    with LaggingGpu(seed=1, clock=clock) as gpu:
        stream = gpu.streams.new_stream()
        module = torch.get_device_module(GPU_DEVICE)
        times = StreamClock(lambda: module.Event(enable_timing=True), stream, clock)
        last = 0
        for _ in range(6000):
            now[0] += PERIOD // 10
            zero, event = times.zero(), module.Event(enable_timing=True)
            event.record(stream)
            event.synchronize()
            found = times.nanoseconds(event, zero)
            assert last <= found
            assert abs(found - now[0]) < 200_000
            last = found
        assert abs(last - now[0]) < 20_000
