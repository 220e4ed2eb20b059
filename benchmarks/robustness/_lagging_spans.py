"""Ten minutes of tasks on a GPU whose clock drifts, in virtual time: do the times that are told fit each other?"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

import torch

from moesched.devices.lagging.device import LaggingGpu
from moesched.devices.lagging.tensors import DEVICE_TYPE
from moesched.devices.torch.cuda_streams import CudaStreams, CudaTask
from moesched.tasks import Kernel, Lane, Task
from moesched.work import Work

READING = 300
"""Nanoseconds that it takes to read the host's clock."""
LONGEST_TASK, LONGEST_PAUSE = 3_000_000, 40_000_000
"""Nanoseconds of a task, and of a pause of the host."""
IMPRECISE = 100_000
"""Nanoseconds by which a task may seem to be shorter than it was."""
IN_FLIGHT = 6
LANES = [Lane("accelerator"), Lane("host->gpu"), Lane("gpu->host")]
HOST = Lane("host")


class HostClock:
    """The host's clock, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        self.now += READING
        return self.now


class Ran(NamedTuple):
    """A task that ran, those that it waited for, and the time that it surely took."""

    lane: Lane
    start: int
    end: int
    after: list[int]
    length: int


class Found(NamedTuple):
    """Result: the number of tasks and the problems that were found.

    Attributes:
        worst: nanoseconds by which a task began too early, at most.
    """

    tasks: int
    problems: list[str]
    worst: int


def minutes_of_tasks(seed: int, minutes: int = 10) -> Found:
    """Run tasks that wait for each other on three streams and on the host, and check their times."""
    ran = _ran(Random(seed), seed, minutes)
    problems, worst = [], 0
    last: dict[Lane, int] = {}
    for number, task in ran.items():
        lane = task.lane
        if task.end - task.start < task.length - IMPRECISE:
            problems.append(f"task {number} on {lane.name} took {task.end - task.start} ns of {task.length}")
        early = {f"the task before it on {lane.name}": last.get(lane, 0) - task.start}
        early |= {
            f"task {other} on {ran[other].lane.name}": ran[other].end - task.start for other in task.after
        }
        early["its own start"] = task.start - task.end
        last[lane] = task.end
        for what, nanoseconds in early.items():
            if nanoseconds > 0:
                worst = max(worst, nanoseconds)
                problems.append(
                    f"task {number} on {lane.name} begins {nanoseconds} ns before the end of {what}"
                )
    return Found(len(ran), problems, worst)


def _ran(choose: Random, seed: int, minutes: int) -> dict[int, Ran]:
    clock = HostClock()

    def execute(task: Task) -> int:
        length = choose.randrange(LONGEST_TASK)

        def work() -> None:
            clock.now += length

        gpu.streams.current.enqueue(work)
        return length

    ran: dict[int, Ran] = {}
    device = torch.device(DEVICE_TYPE, seed % 2)  # neighbours drift in opposite directions
    with LaggingGpu(seed=seed, clock=clock, count=2) as gpu:
        streams = CudaStreams(device, [lane.name for lane in LANES], execute, clock)
        flying: deque[tuple[Task, list[int], CudaTask]] = deque()
        begin, number, host = clock.now, 0, -1
        while clock.now - begin < minutes * 60 * 10**9:
            clock.now += choose.choice((0, choose.randrange(LONGEST_PAUSE)))
            lane = choose.choice(LANES)
            others = [task for task, _, _ in flying if task.lane is not lane and choose.random() < 0.3]
            task = Kernel(lane, Work("work", "gpu"), "work", id=number)
            after = [each.id for each in others] + ([host] if host >= 0 else [])
            flying.append((task, after, streams.issue(task, others)))
            number += 1
            if len(flying) >= IN_FLIGHT:
                ended = [flying.popleft() for _ in range(choose.randint(1, 3))]
                for ran_task, waited_for, issued in reversed(ended):  # as lanes wait for several at once
                    issued.wait()
                    ran[ran_task.id] = Ran(ran_task.lane, *issued.span(), waited_for, issued.value)
                start = clock()
                clock.now += choose.randrange(20_000)
                host, number = number, number + 1
                ran[host] = Ran(HOST, start, clock(), [task.id for task, _, _ in ended], 0)
    return dict(sorted(ran.items()))
