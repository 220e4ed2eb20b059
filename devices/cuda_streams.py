"""CUDA streams as lanes: one stream a lane, events for edges between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

import torch

from moesched.tasks import Task

_UNTYPED: Any = torch.cuda
"""torch gives the constructors of streams and events no types."""

REMEMBERED = 4096
"""How many tasks' events are kept: more than can be in flight, so that a later task finds the events it waits for."""


class CudaStreams:
    """Issues tasks to the streams of one CUDA device.

    Args:
        device: such as "cuda:0".
        lanes: the names of the lanes that are streams.
        execute: enqueues a task's kernels on the current stream; its value is the task's.
    """

    def __init__(self, device: torch.device, lanes: Iterable[str], execute: Callable[[Task], Any]) -> None:
        self._streams = {name: _stream(device) for name in lanes}
        self._execute = execute
        self._ends: dict[int, torch.cuda.Event] = {}
        with torch.cuda.device(device):
            self._zero = _timed_event()
            torch.cuda.synchronize(device)
            self._zero.record()
            self._zero.synchronize()
            self._zero_nanoseconds = perf_counter_ns()

    def issue(self, task: Task, after: list[Task]) -> CudaTask:
        """Enqueue a task on its lane's stream, behind the tasks `after` on other streams."""
        stream = self._streams[task.lane.name]
        with torch.cuda.stream(stream):
            for other in after:
                stream.wait_event(self._ends[other.id])
            start, end = _timed_event(), _timed_event()
            start.record()
            value = self._execute(task)
            end.record()
        self._ends[task.id] = end
        if len(self._ends) > REMEMBERED:
            del self._ends[next(iter(self._ends))]
        return CudaTask(self, start, end, value)

    def nanoseconds(self, event: torch.cuda.Event) -> int:
        """When an event happened, on the clock of `time.perf_counter_ns`."""
        milliseconds: float = self._zero.elapsed_time(event)
        return self._zero_nanoseconds + round(milliseconds * 1e6)


class CudaTask:
    """A task that a stream has taken in."""

    def __init__(
        self, streams: CudaStreams, start: torch.cuda.Event, end: torch.cuda.Event, value: Any
    ) -> None:
        self.value = value
        self._streams = streams
        self._start = start
        self._end = end

    def wait(self) -> None:
        """Block until the stream has run it."""
        self._end.synchronize()

    def span(self) -> tuple[int, int]:
        """When it ran, on the clock of `time.perf_counter_ns`."""
        return self._streams.nanoseconds(self._start), self._streams.nanoseconds(self._end)


def _timed_event() -> torch.cuda.Event:
    event: torch.cuda.Event = _UNTYPED.Event(enable_timing=True)
    return event


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = _UNTYPED.Stream(device)
    return stream
