"""A device with streams, played by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from moesched.drivers.lanes import ThreadQueue
from moesched.tasks import (
    Lane,
    Task,
)


class ThreadStreams:
    """A device with streams, played by a thread for each: it runs what it was issued in order, behind other streams."""

    def __init__(self, lanes: Sequence[Lane], execute: Callable[[Task], Any]) -> None:
        self._execute = execute
        self._issued: dict[Task, ThreadIssued] = {}
        self._streams = {lane: ThreadQueue(f"stream {lane.name}", self._run) for lane in lanes if lane.domain}
        for stream in self._streams.values():
            stream.open()

    def issue(self, task: Task, after: list[Task]) -> ThreadIssued:
        """Hand a task to its stream, behind the tasks `after` on other streams."""
        issued = self._issued[task] = ThreadIssued(task, [self._issued[other] for other in after])
        self._streams[task.lane].put(issued)
        return issued

    def close(self) -> None:
        """End the streams, which are idle."""
        for stream in self._streams.values():
            stream.close()

    def _run(self, issued: ThreadIssued) -> None:
        for other in issued.after:
            other.ended.wait()
        start = perf_counter_ns()
        try:
            issued.value = self._execute(issued.task)
        except BaseException as error:
            issued.error = error
        issued.times = start, perf_counter_ns()
        issued.ended.set()


class ThreadIssued:
    """A task that a stream has taken in."""

    def __init__(self, task: Task, after: list[ThreadIssued]) -> None:
        self.task = task
        self.after = after
        self.ended = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.times = (0, 0)

    def wait(self) -> None:
        """Block until it ended; raises what it raised."""
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[int, int]:
        """Its start and end."""
        return self.times
