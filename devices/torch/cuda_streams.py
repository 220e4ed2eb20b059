"""CUDA streams as lanes: one stream a lane, events for edges between them.

Memory needs no `record_stream`: torch reuses a tensor's bytes on the stream that allocated it, and a task of that
stream drops the tensor. It is the task that overwrites the tensor's block after waiting for all its users, or the last
user.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

import torch

from moesched.tasks import Task

REMEMBERED = 4096
"""Number of tasks whose events are kept. More than can be in flight: a later task finds the events it waits for."""


class CudaStreams:
    """Issues tasks to the streams of one CUDA device.

    Args:
        device: such as "cuda:0"; torch's module of its type has the streams and events.
        lanes: the names of the lanes that are streams.
        execute: enqueues a task's kernels on the current stream; its value is the task's.
    """

    def __init__(self, device: torch.device, lanes: Iterable[str], execute: Callable[[Task], Any]) -> None:
        self._module: Any = torch.get_device_module(device)
        self._streams = {name: self._module.Stream(device) for name in lanes}
        self._execute = execute
        self._issued: dict[int, CudaTask] = {}
        self._unused: list[torch.cuda.Event] = []
        self._lock = threading.Lock()
        self._device = device
        with self._module.device(device):
            self._zero = self._timed_event()
        self._zero_nanoseconds = 0
        self.begin()

    def begin(self) -> None:
        """Synchronise the clocks again for a new run: CUDA's times get coarser with the distance."""
        with self._module.device(self._device):
            self._module.synchronize(self._device)
            self._zero.record()
            self._zero.synchronize()
            self._zero_nanoseconds = perf_counter_ns()

    def issue(self, task: Task, after: list[Task]) -> CudaTask:
        """Enqueue a task on its lane's stream, behind the tasks `after` on other streams."""
        stream = self._streams[task.lane.name]
        with self._lock:
            before = [self._issued[other.id].end for other in after]
            start, end = self._event(), self._event()
        with self._module.stream(stream):
            for event in before:
                stream.wait_event(event)
            start.record()
            value = self._execute(task)
            end.record()
        issued = CudaTask(self, start, end, value)
        with self._lock:
            self._remember(task.id, issued)
        return issued

    def _timed_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._module.Event(enable_timing=True)
        return event

    def _event(self) -> torch.cuda.Event:
        return self._unused.pop() if self._unused else self._timed_event()

    def _remember(self, number: int, issued: CudaTask) -> None:
        """Forget the oldest task instead; a stream may still wait for one of its events."""
        self._forget(number)  # of a run before
        self._issued[number] = issued
        if len(self._issued) > REMEMBERED:
            self._forget(next(iter(self._issued)))

    def _forget(self, number: int) -> None:
        old = self._issued.pop(number, None)
        if old is not None and old.was_read:
            self._unused += [old.start, old.end]

    def nanoseconds(self, event: torch.cuda.Event) -> int:
        """When an event happened, on the clock of `time.perf_counter_ns`."""
        milliseconds: float = self._zero.elapsed_time(event)
        return self._zero_nanoseconds + round(milliseconds * 1e6)


class CudaTask:
    """A task that was enqueued on a stream.

    Attributes:
        start, end: events around it.
        was_read: whether its span was read, so that the times of its events are no longer needed.
    """

    def __init__(
        self, streams: CudaStreams, start: torch.cuda.Event, end: torch.cuda.Event, value: Any
    ) -> None:
        self.value = value
        self.start = start
        self.end = end
        self.was_read = False
        self._streams = streams

    def wait(self) -> None:
        """Block until the stream has run it."""
        self.end.synchronize()

    def span(self) -> tuple[int, int]:
        """When it ran, on the clock of `time.perf_counter_ns`; once only."""
        span = self._streams.nanoseconds(self.start), self._streams.nanoseconds(self.end)
        self.was_read = True
        return span
