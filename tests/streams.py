"""Streams of a device that is not there: threads that work through queues, as CUDA's streams do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from moesched.tasks import Lane, Task


class Operation:
    """A task in a fake stream: what it does, and an event that is set when it is done."""

    def __init__(self, work: Callable[[], Any], after: list[Operation]) -> None:
        self._work = work
        self._after = after
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._span = (0, 0)
        self.value: Any = None

    def run(self) -> None:
        for other in self._after:
            other._done.wait()
        start = perf_counter_ns()
        try:
            self.value = self._work()
        except BaseException as error:
            self._error = error
        self._span = (start, perf_counter_ns())
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    def span(self) -> tuple[int, int]:
        return self._span


class FakeStreams:
    """A device whose streams are threads that work through a queue, as CUDA's do."""

    def __init__(self, execute: Callable[[Task], Any], operation: type[Operation] = Operation) -> None:
        self._execute = execute
        self._operation = operation
        self._queues: dict[Lane, queue.SimpleQueue[Operation | None]] = {}
        self._operations: dict[Task, Operation] = {}
        self.issued: list[str] = []
        self.after_issue: Callable[[], object] = lambda: None

    def issue(self, task: Task, after: list[Task]) -> Operation:
        self.issued.append(task.label)
        operation = self._operation(lambda: self._execute(task), [self._operations[other] for other in after])
        self._operations[task] = operation
        self._stream(task.lane).put(operation)
        self.after_issue()
        return operation

    @property
    def operations(self) -> list[Operation]:
        """The operations that were issued, in the order of issue."""
        return [*self._operations.values()]

    def close(self) -> None:
        for stream in self._queues.values():
            stream.put(None)

    def _stream(self, lane: Lane) -> queue.SimpleQueue[Operation | None]:
        if lane not in self._queues:
            self._queues[lane] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._queues[lane],), daemon=True).start()
        return self._queues[lane]

    @staticmethod
    def _run(stream: queue.SimpleQueue[Operation | None]) -> None:
        while (operation := stream.get()) is not None:
            operation.run()
