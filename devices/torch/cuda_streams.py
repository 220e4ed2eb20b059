"""CUDA streams as lanes: a stream for each lane, and events where a task waits for one of another lane.

Memory needs no `record_stream`: torch reuses a tensor's bytes on the stream that allocated it. The tensor is dropped by
a task of that stream: the last that uses it, or the one that overwrites its block after waiting for all its users.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from moesched.tasks import Task

from .at_once import settled
from .stream_clock import StreamClock, Zero


class CudaStreams:
    """Issues tasks to the streams of one CUDA device.

    Args:
        device: torch device, such as "cuda:0"; torch's module of that type has the streams and events.
        lanes: the names of the lanes that are streams, the accelerator's first.
        execute: enqueues a task's kernels on the current stream; returns the task's value.
        clock: the host's clock in nanoseconds, for the times of tasks.
    """

    def __init__(
        self,
        device: torch.device,
        lanes: Iterable[str],
        execute: Callable[[Task], Any],
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._module: Any = torch.get_device_module(device)
        self._streams = {name: self._module.Stream(device) for name in lanes}
        self._execute = execute
        self._issued: dict[int, CudaTask] = {}
        self._unused: list[torch.cuda.Event] = []
        self._lock = threading.Lock()
        self._device = device
        self._host_clock = clock
        self.begin()

    def begin(self) -> None:
        """Prepare a run: forget failed tasks of earlier runs, all of which have ended, and measure times anew."""
        self._issued.clear()
        stream = self._module.Stream(self._device)
        self._clock = StreamClock(self._timed_event, stream, self._host_clock)

    def run(self, task: Task) -> Any:
        """Run a task of a lane that is no stream, and wait for its end.

        Its allocations belong to the first lane's stream, the accelerator's, as do the tasks that free them.
        """
        return self.complete(partial(self._execute, task))

    def complete(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first lane's stream, and wait for its end."""
        stream = next(iter(self._streams.values()))
        with self._module.stream(stream):
            value = work()
            stream.synchronize()
        return settled(value)

    def issue(self, task: Task, after: list[Task]) -> CudaTask:
        """Enqueue a task on its lane's stream, after the tasks `after` on other streams."""
        stream = self._streams[task.lane.name]
        with self._lock:
            for other in after:
                issued = self._issued.get(other.id)
                if issued is not None and other.lane is not task.lane:  # otherwise it has ended, or is ahead
                    stream.wait_event(issued.end)
            issued = CudaTask(self, task.id, self._event(), self._event(), self._clock.zero())
            issued.issued_at = self._host_clock()
            issued.start.record(stream)
            self._issued[task.id] = issued
        with self._module.stream(stream):
            issued.result = self._execute(task)
            issued.end.record()
        return issued

    def span_of(self, issued: CudaTask) -> tuple[int, int]:
        """The start and end of a task that has ended, in nanoseconds of the host's clock; frees its events."""
        with self._lock:
            start, end = (self._time_of(event, issued.zero) for event in (issued.start, issued.end))
            del self._issued[issued.number]
            self._unused += [issued.start, issued.end]
        return start, end

    def _time_of(self, event: torch.cuda.Event, zero: Zero) -> int:
        """The time of an event on the host's clock, which is not after now, nor after the issue of any later task."""
        device = self._clock.on_device(event, zero)
        reckoned = self._clock.reckoned(device)
        for other in reversed(self._issued.values()):
            if other.issued_at <= reckoned:
                break
            if other.start.query() and self._clock.on_device(other.start, other.zero) <= device:
                reckoned = other.issued_at
                break
        return self._clock.reported(device, min(reckoned, self._host_clock()))

    def _timed_event(self) -> torch.cuda.Event:
        # Threads that wait leave their cores to attention on the CPU.
        event: torch.cuda.Event = self._module.Event(enable_timing=True, blocking=True)
        return event

    def _event(self) -> torch.cuda.Event:
        return self._unused.pop() if self._unused else self._timed_event()


class CudaTask:
    """A task that was enqueued on a stream.

    Attributes:
        number: the task's id.
        start, end: events before and after the task.
        zero: the event from which their times are measured.
        issued_at: time at which it was issued, in nanoseconds of the host's clock.
        result: the task's value, or a `Later` of it.
    """

    def __init__(
        self,
        streams: CudaStreams,
        number: int,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        zero: Zero,
    ) -> None:
        self.result: Any = None
        self.number = number
        self.start = start
        self.end = end
        self.zero = zero
        self.issued_at = 0
        self._streams = streams

    def wait(self) -> None:
        """Block until the stream has run the task."""
        if not self.end.query():
            self.end.synchronize()

    @property
    def value(self) -> Any:
        """The task's value; may be read once, after `wait`."""
        return settled(self.result)

    def span(self) -> tuple[int, int]:
        """The start and end in nanoseconds of the host's clock; may be called once, after `wait`."""
        return self._streams.span_of(self)
