"""Tasks on CUDA streams: each lane has a stream, and an event lets a task wait for a task of another lane.

Tensors need no `record_stream`. Torch reuses the memory of a dropped tensor on the stream that allocated it, and a task
of that same stream drops the tensor: either the last task that uses the tensor, or the task that replaces the tensor by
a new one, after waiting for all users of the old one.
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
        device: torch device, such as "cuda:0"; torch's module for this type of device makes the streams and events.
        lanes: the names of the lanes that have a stream, with the accelerator's lane first.
        execute: a function that enqueues a task's kernels on the current stream, and returns the task's value.
        clock: returns the host's time in nanoseconds.
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
        self._issued: dict[str, dict[int, CudaTask]] = {name: {} for name in self._streams}
        """The tasks whose times were not read yet, by lane and id, in the order of issue."""
        self._unused: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Pairs of events for the start and the end of a task."""
        self._lock = threading.Lock()
        self._here = threading.local()
        self._device = device
        self._host_clock = clock
        self.begin()

    def begin(self) -> None:
        """Prepare for a run: start a new clock, and forget earlier tasks, which must all have ended."""
        for tasks in self._issued.values():
            tasks.clear()
        stream = self._module.Stream(self._device)
        self._clock = StreamClock(self._timed_event, stream, self._host_clock)

    def run(self, task: Task) -> Any:
        """Run a task of a lane that has no stream, and wait for the task's end; returns its value.

        The task runs on the stream of the accelerator's lane. So it allocates memory on the same stream on which other
        tasks free that memory later.
        """
        return self.complete(partial(self._execute, task))

    def complete(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the stream of the accelerator's lane, and wait until the stream has ended it.

        Returns:
            the value of `work`; if it is a `Later` (a value that is being copied to the host), the copied value.
        """
        stream = next(iter(self._streams.values()))
        with self._module.stream(stream):
            value = work()
            stream.synchronize()
        return settled(value)

    def issue(self, task: Task, after: list[Task]) -> CudaTask:
        """Enqueue a task on its lane's stream; the task's kernels wait for the ends of the tasks `after`.

        The lane's stream stays the calling thread's current one.
        """
        lane = task.lane.name
        stream = self._streams[lane]
        with self._lock:
            for other in after:
                issued = self._issued[other.lane.name].get(other.id)
                if issued is not None and other.lane is not task.lane:  # otherwise it has ended, or is ahead
                    stream.wait_event(issued.end)
            now = self._host_clock()
            events = self._unused.pop() if self._unused else (self._timed_event(), self._timed_event())
            issued = CudaTask(self, lane, task.id, events, self._clock.zero(now), now)
            issued.start.record(stream)
            self._issued[lane][task.id] = issued
        self._choose(stream)
        issued.result = self._execute(task)
        issued.end.record()
        return issued

    def _choose(self, stream: torch.cuda.Stream) -> None:
        """Make a stream the calling thread's current one, until the thread issues to another stream.

        Each lane has a thread of its own, so a thread sets its stream only once. Entering `torch.cuda.stream` for each
        task would take as long as the launch of a kernel.
        """
        if getattr(self._here, "stream", None) is not stream:
            self._module.set_stream(stream)
            self._here.stream = stream

    def span_of(self, issued: CudaTask) -> tuple[int, int]:
        """Return the start and the end of a task that has ended, in nanoseconds of the host's clock.

        Call this only once for each task: the task's events are used again for other tasks.
        """
        with self._lock:
            now = self._host_clock()
            others = [tasks for lane, tasks in self._issued.items() if tasks and lane != issued.lane]
            start = self._time_of(issued, issued.start, others, now)
            end = self._time_of(issued, issued.end, others, now)
            del self._issued[issued.lane][issued.number]
            self._unused.append((issued.start, issued.end))
        return start, end

    def _time_of(
        self, issued: CudaTask, event: torch.cuda.Event, others: list[dict[int, CudaTask]], now: int
    ) -> int:
        """Return the time of an event of a task on the host's clock, in nanoseconds.

        The time is adjusted so that it is not later than `now`, and not earlier than the issue of this task. If a task
        of another lane had started before the event, the time is not earlier than the issue of that task either.

        Args:
            issued: the task.
            event: the start or the end of the task.
            others: for each other lane that has tasks, these tasks by id, in the order of issue.
            now: the present time on the host's clock.
        """
        clock = self._clock
        device = clock.on_device(event, issued.zero)
        reckoned = max(clock.reckoned(device), issued.issued_at)
        for tasks in others:
            for other in reversed(tasks.values()):
                if other.issued_at <= reckoned:
                    break
                if other.start.query() and clock.on_device(other.start, other.zero) <= device:
                    reckoned = other.issued_at
                    break
        return clock.reported(device, min(reckoned, now))

    def _timed_event(self) -> torch.cuda.Event:
        # Threads that wait leave their cores to attention on the CPU.
        event: torch.cuda.Event = self._module.Event(enable_timing=True, blocking=True)
        return event


class CudaTask:
    """A task that was enqueued on a stream.

    Attributes:
        lane: the name of the task's lane.
        number: the task's id.
        start, end: events that happen on the stream before and after the task.
        zero: the event that the times of `start` and `end` are measured from.
        issued_at: time at which the task was enqueued, in nanoseconds of the host's clock.
        result: the task's value, or a `Later`: a value that is still being copied to the host.
    """

    __slots__ = ("_streams", "end", "issued_at", "lane", "number", "result", "start", "zero")

    def __init__(
        self,
        streams: CudaStreams,
        lane: str,
        number: int,
        events: tuple[torch.cuda.Event, torch.cuda.Event],
        zero: Zero,
        issued_at: int,
    ) -> None:
        self.result: Any = None
        self.lane = lane
        self.number = number
        self.start, self.end = events
        self.zero = zero
        self.issued_at = issued_at
        self._streams = streams

    def wait(self) -> None:
        """Block until the stream has run the task."""
        if not self.end.query():
            self.end.synchronize()

    @property
    def value(self) -> Any:
        """The task's value; may be read only once, after `wait`."""
        return settled(self.result)

    def span(self) -> tuple[int, int]:
        """Return the task's start and end in nanoseconds of the host's clock; may be called only once, after `wait`."""
        return self._streams.span_of(self)
