"""CUDA's streams, imitated: edges hold whatever runs first, and times stay on the host's clock."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch

from benchmarks.robustness._lagging_spans import minutes_of_tasks
from moesched.devices.lagging.device import GPU_DEVICE, LaggingGpu
from moesched.devices.torch.at_once import library_of
from moesched.devices.torch.cuda_streams import CudaStreams
from moesched.devices.torch.stream_clock import PERIOD, REPORTED, StreamClock
from moesched.tasks import Kernel, Lane, Task
from moesched.work import Work

LANES = [Lane("a"), Lane("b")]
NETWORK = Lane("network")


class Value:
    """The value of a task."""


@pytest.fixture(params=range(3))
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


def test_a_thread_that_issues_to_two_lanes_runs_each_task_on_the_stream_of_its_lane(gpu: LaggingGpu) -> None:
    found = set()
    streams = CudaStreams(
        GPU_DEVICE, ("a", "b"), lambda task: found.add((task.lane.name, id(gpu.streams.current)))
    )
    for task in islice(tasks(), 10):
        streams.issue(task, [])
    assert len(found) == len({stream for _, stream in found}) == 2


def test_a_task_whose_times_were_read_counts_as_ended_and_leaves_nothing_but_its_events_for_the_next(
    gpu: LaggingGpu,
) -> None:
    streams = CudaStreams(GPU_DEVICE, ("a", "b"), lambda task: Value())
    values = []
    before: list[Task] = []
    for task in islice(tasks(), 100):
        issued = streams.issue(task, before)
        assert issued.end.blocking  # type: ignore[attr-defined]  # waiting threads leave their core
        issued.wait()
        start, end = issued.span()
        assert start <= end
        values.append(weakref.ref(issued.value))
        before = [task]
    del issued
    assert not any(value() for value in values)
    assert gpu.streams.events_made < 10


def test_what_a_task_of_a_thread_allocates_goes_to_nobody_before_the_accelerator_used_it(
    gpu: LaggingGpu,
) -> None:
    """Such as the sum of an exchange, which a task of the accelerator reads and drops while it is issued."""
    sums: list[torch.Tensor] = []
    totals: list[torch.Tensor] = []

    def execute(task: Task) -> None:
        if task.lane is NETWORK:
            sums.append(torch.full((1000,), task.id, device=GPU_DEVICE))
        else:
            totals.append(sums.pop().sum())

    streams = CudaStreams(GPU_DEVICE, ("a", "b"), execute)
    for number in range(20):
        streams.run(Kernel(NETWORK, Work("all_reduce", "gpu"), "all_reduce", id=2 * number))
        last = streams.issue(Kernel(LANES[0], Work("add", "gpu"), "add", id=2 * number + 1), [])
    last.wait()
    assert [total.item() for total in totals] == [2000 * number for number in range(20)]


def test_a_value_is_read_when_its_task_has_ended(gpu: LaggingGpu) -> None:
    library = library_of(GPU_DEVICE)

    def execute(task: Task) -> Any:
        there = torch.full((3,), task.id, device=GPU_DEVICE)
        return library.value(task, lambda array: array.tolist(), there)

    streams = CudaStreams(GPU_DEVICE, ("a", "b"), execute)
    for number in range(10):
        assert streams.run(Kernel(NETWORK, Work("route", "gpu"), "route", id=2 * number)) == [2 * number] * 3
        issued = streams.issue(Kernel(LANES[0], Work("route", "gpu"), "route", id=2 * number + 1), [])
        issued.wait()
        assert issued.value == [2 * number + 1] * 3
        assert library.settled(execute(Kernel(LANES[0], Work("route", "gpu"), "route", id=7))) == [7] * 3


def test_tasks_that_failed_are_forgotten_when_the_next_run_begins(gpu: LaggingGpu) -> None:
    def execute(task: Task) -> None:
        raise RuntimeError("out of luck")

    streams = CudaStreams(GPU_DEVICE, ("a", "b"), execute)
    for task in islice(tasks(), 50):
        with pytest.raises(RuntimeError, match="out of luck"):
            streams.issue(task, [])
    gpu.streams.synchronize(0)
    streams.begin()
    gc.collect()
    assert len(gpu.streams.events) < 10


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
            zero, event = times.zero(clock()), module.Event(enable_timing=True)
            event.record(stream)
            event.synchronize()
            found = times.reckoned(times.on_device(event, zero))
            assert last <= found
            assert abs(found - now[0]) < 200_000
            last = found
        assert abs(last - now[0]) < 20_000


@pytest.mark.parametrize(
    "reports",
    [
        [(5000.0, 11_000, 11_000), (7000.0, 10_900, 11_000), (3000.0, 11_100, 11_000)]
        + [(9000.0, 11_200, 11_200), (8000.0, 11_100, 11_100), (8500.0, 11_050, 11_100)],
        [(5000.0, 11_000, 11_000), (5000.0, 10_900, 11_000), (5000.0, 11_100, 11_000)]
        + [(4950.0, 10_950, 11_000), (5050.0, 11_050, 11_000), (4800.0, 10_800, 10_800)],
    ],
    ids=["in the order of the device", "one, where float32 does not tell their order"],
)
def test_times_that_are_told_are(reports: list[tuple[float, int, int]]) -> None:
    with LaggingGpu() as gpu:
        module = torch.get_device_module(GPU_DEVICE)
        times = StreamClock(lambda: module.Event(enable_timing=True), gpu.streams.new_stream())
        for on_device, reckoned, told in reports:
            assert times.reported(on_device, reckoned) == told


def test_a_time_before_all_that_are_remembered_is_told_as_it_is_reckoned() -> None:
    with LaggingGpu() as gpu:
        module = torch.get_device_module(GPU_DEVICE)
        times = StreamClock(lambda: module.Event(enable_timing=True), gpu.streams.new_stream())
        for number in range(1, 2 * REPORTED + 2):
            times.reported(1000.0 * number, 1000 * number)
        assert times.reported(500.0, 510) == 510
        assert times.reported(2_000_000.0, 1_999_000) == 2_000_000


def test_tasks_on_streams_and_on_the_host_have_times_that_fit_each_other() -> None:
    assert minutes_of_tasks(seed=1, minutes=2).problems == []
