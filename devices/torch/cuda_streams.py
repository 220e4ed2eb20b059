"""CUDA streams as lanes: one stream a lane, events for edges between them.

Memory needs no `record_stream`: torch reuses a tensor's bytes on the stream that allocated it, and a task of that
stream drops the tensor. It is the task that overwrites the tensor's block after waiting for all its users, or the last
user.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moesched.tasks import Task

from .stream_clock import StreamClock, Zero


class CudaStreams:
    """Issues tasks to the streams of one CUDA device.

    Args:
        device: such as "cuda:0"; torch's module of its type has the streams and events.
        lanes: the names of the lanes that are streams, the accelerator's first.
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
        self.begin()

    def begin(self) -> None:
        """Wait for what an earlier run left, and forget it."""
        with self._module.device(self._device):
            self._module.synchronize(self._device)
            self._issued.clear()
            self._clock = StreamClock(self._timed_event, self._module.Stream(self._device))

    def run(self, task: Task) -> Any:
        """Run a task of a lane that is no stream, to its end.

        What it allocates belongs to the first lane's stream, the accelerator's, as do the tasks that drop it.
        """
        stream = next(iter(self._streams.values()))
        with self._module.stream(stream):
            value = self._execute(task)
            stream.synchronize()
        return value

    def issue(self, task: Task, after: list[Task]) -> CudaTask:
        """Enqueue a task on its lane's stream, behind the tasks `after` on other streams."""
        stream = self._streams[task.lane.name]
        with self._lock:
            for other in after:
                issued = self._issued.get(other.id)
                if issued is not None and other.lane is not task.lane:  # otherwise it has ended, or is ahead
                    stream.wait_event(issued.end)
            start, end, zero = self._event(), self._event(), self._clock.zero()
        with self._module.stream(stream):
            start.record()
            value = self._execute(task)
            end.record()
        issued = CudaTask(self, task.id, start, end, zero, value)
        with self._lock:
            self._issued[task.id] = issued
        return issued

    def span_of(self, issued: CudaTask) -> tuple[int, int]:
        """When a task ran that has ended, on the clock of `time.perf_counter_ns`; its events are used again."""
        with self._lock:
            clock = self._clock
            span = clock.nanoseconds(issued.start, issued.zero), clock.nanoseconds(issued.end, issued.zero)
            del self._issued[issued.number]
            self._unused += [issued.start, issued.end]
        return span

    def _timed_event(self) -> torch.cuda.Event:
        # Threads that wait leave their cores to attention on the CPU.
        event: torch.cuda.Event = self._module.Event(enable_timing=True, blocking=True)
        return event

    def _event(self) -> torch.cuda.Event:
        return self._unused.pop() if self._unused else self._timed_event()


class CudaTask:
    """A task that was enqueued on a stream.

    Attributes:
        number: the task's.
        start, end: events around it.
        zero: what their times are measured from.
    """

    def __init__(
        self,
        streams: CudaStreams,
        number: int,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        zero: Zero,
        value: Any,
    ) -> None:
        self.value = value
        self.number = number
        self.start = start
        self.end = end
        self.zero = zero
        self._streams = streams

    def wait(self) -> None:
        """Block until the stream has run it."""
        self.end.synchronize()

    def span(self) -> tuple[int, int]:
        """When it ran, on the clock of `time.perf_counter_ns`; once only, after `wait`."""
        return self._streams.span_of(self)
