"""Runners: each runs the tasks of a lane in real time. There is one class for each kind of lane.

The kinds are "thread", "guest", "loop", "awaitable" and "stream". When the engine has started a task on a lane, the
driver calls the runner's `start` while it holds the engine's lock. The runner runs the task, and reports its end to the
driver through `LaneReports`. A guest is a thread lane whose tasks the threads of other lanes may run, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from moesched.seams import Issued, Streams
from moesched.stream_edges import before_on_device
from moesched.tasks import Lane, Task

Execute = Callable[[Task], Any]
Clock = Callable[[], int]
"""A monotonic clock in nanoseconds; any origin will do."""

LOOP_SLICE_NANOSECONDS = 1_000_000
"""Nanoseconds for which tasks may run on the event loop before it handles other events."""

ENDS_TOGETHER = 16
"""Number of issued tasks whose ends are reported together, as long as the host needs none of them."""


class LaneReports(Protocol):
    """The driver's methods by which runners report that a task was issued or has ended.

    Both methods may return a task that the calling runner, the argument `mine`, must start at once.
    """

    clock: Clock
    origin: int
    lock: threading.Lock

    def complete(
        self, task: Task, value: object, error: BaseException | None, mine: Runner | None
    ) -> Task | None:
        """Report that a task ended; call this with the engine's lock held.

        Args:
            value: the task's value; not used if there is an error.
            error: the exception that the task raised; None if it succeeded.
            mine: the calling runner, if its thread can run a further task; else None.

        Returns:
            a task that the calling runner has to start now; None if there is none.
        """

    def issued(self, task: Task, mine: Runner) -> Task | None:
        """Report that a task was issued to a stream; call this with the engine's lock held.

        Returns:
            a task that the calling runner `mine` has to start now; None if there is none.
        """


class Runner(Protocol):
    """Runs the tasks of a lane.

    Attributes:
        guest: whether threads of other runners may run this lane's tasks. A method of `LaneReports` may return such a
            task, and the runner that called the method then runs it.
        host: whether this runner's threads may run tasks of lanes that are guests.
    """

    guest: bool
    host: bool

    def start(self, task: Task) -> None:
        """Start a task without blocking; called with the engine's lock held."""

    def open(self) -> None:
        """Prepare the runner for tasks; called before the first task."""

    def close(self) -> None:
        """Stop the runner; called when all tasks have ended."""


class Worker:
    """A thread of a lane; it waits for tasks by a raw lock, which is cheaper than a condition or an event."""

    __slots__ = ("task", "thread", "wake")

    def __init__(self, name: str, work: Callable[[Worker], None]) -> None:
        self.task: Task | None = None
        self.wake = threading.Lock()
        self.wake.acquire()
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)
        self.thread.start()

    def go_on(self, task: Task | None) -> None:
        """Give the thread its next task; None ends the thread."""
        self.task = task
        self.wake.release()


class ThreadRunner:
    """Runs a lane's tasks on a thread, which reports the end of each task and takes the lane's next task itself.

    A guest is a lane whose tasks other runners' threads may run. If the finished task released a guest's task, and this
    lane has no next task, the same thread runs the guest's task. So no thread has to be woken for the guest's task, nor
    for a task of this lane that follows it. If this lane gets a task meanwhile, a further thread runs that one.

    Args:
        driver: receives the reports of ends.
        execute: runs a task and returns its value.
        guest: whether this lane is a guest, with tasks that are short or mostly wait.
    """

    host = True

    def __init__(self, driver: LaneReports, lane: Lane, execute: Execute, *, guest: bool = False) -> None:
        self.guest = guest
        self._driver = driver
        self._execute = execute
        self._name = f"lane {lane.name}"
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    def open(self) -> None:
        self._idle.append(self._new())

    def start(self, task: Task) -> None:
        worker = self._idle.pop() if self._idle else self._new()
        worker.go_on(task)

    def close(self) -> None:
        for worker in self._workers:
            worker.go_on(None)
        for worker in self._workers:
            worker.thread.join()

    def _new(self) -> Worker:
        worker = Worker(self._name, self._work)
        self._workers.append(worker)
        return worker

    def _work(self, worker: Worker) -> None:
        driver, execute, wake, idle = self._driver, self._execute, worker.wake, self._idle
        clock, origin, lock, complete = driver.clock, driver.origin, driver.lock, driver.complete
        while True:
            wake.acquire()
            task = worker.task
            if task is None:
                return
            while task is not None:
                value = error = None
                task.start = clock() - origin
                try:
                    value = execute(task)
                except BaseException as raised:
                    error = raised
                task.end = clock() - origin
                lock.acquire()
                try:
                    task = complete(task, value, error, self)
                    if task is None:
                        idle.append(worker)
                finally:
                    lock.release()


class LoopRunner:
    """Runs tasks of a few microseconds on the event loop; all lanes of kind "loop" share one runner."""

    guest = host = False

    def __init__(self, driver: LaneReports, execute: Execute) -> None:
        self._driver = driver
        self._execute = execute
        self._tasks: deque[Task] = deque()
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    def start(self, task: Task) -> None:
        self._tasks.append(task)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._run)

    def close(self) -> None:
        self._tasks.clear()

    def _run(self) -> None:
        tasks, execute = self._tasks, self._execute
        driver = self._driver
        clock, origin, lock, complete = driver.clock, driver.origin, driver.lock, driver.complete
        now = clock()
        until = now + LOOP_SLICE_NANOSECONDS
        while tasks and now < until:
            task = tasks.popleft()
            value = error = None
            task.start = now - origin
            try:
                value = execute(task)
            except BaseException as raised:
                error = raised
            now = clock()
            task.end = now - origin
            lock.acquire()
            try:
                following = complete(task, value, error, self)
            finally:
                lock.release()
            if following is not None:
                tasks.append(following)
        with lock:
            self._scheduled = bool(tasks)
        if tasks:
            self._loop.call_soon(self._run)


class AwaitableRunner:
    """Runs tasks such as network calls, whose execution returns an awaitable, on the event loop.

    `close` cancels the calls that run, and calls that begin later.
    """

    guest = host = False

    def __init__(self, driver: LaneReports, execute: Execute) -> None:
        self._driver = driver
        self._execute = execute
        self._running: set[asyncio.Future[None]] = set()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    def start(self, task: Task) -> None:
        self._loop.call_soon_threadsafe(self._spawn, task)

    def close(self) -> None:
        self._closed = True
        for running in self._running:
            running.cancel()

    def _spawn(self, task: Task) -> None:
        asyncio.ensure_future(self._run(task)).add_done_callback(self._running.discard)

    def _note_begun(self) -> None:
        """Add the current call to those that `close` cancels; raise CancelledError if `close` was called already."""
        if self._closed:
            raise asyncio.CancelledError
        running = asyncio.current_task()
        assert running is not None
        self._running.add(running)

    async def _run(self, task: Task) -> None:
        value = error = None
        task.start = self._driver.clock() - self._driver.origin
        try:
            self._note_begun()
            value = await self._execute(task)
        except BaseException as raised:
            error = raised
        task.end = self._driver.clock() - self._driver.origin
        with self._driver.lock:
            self._driver.complete(task, value, error, None)


class StreamRunner:
    """Runs tasks on a stream of a device: one thread issues tasks, another one waits for the ends that the host needs.

    The host needs the end of a task that a policy awaits, or that a task outside the device depends on. The ends of all
    other tasks are reported together: with the next end that the host needs, when the stream has no next task, or once
    there are `ENDS_TOGETHER`.
    """

    guest = host = False

    def __init__(self, driver: LaneReports, lane: Lane, streams: Streams) -> None:
        self._driver = driver
        self._lane = lane
        self._streams = streams
        self._issuing = ThreadQueue(f"lane {lane.name}", self._issue)
        self._ending = ThreadQueue(f"lane {lane.name} ends", self._wait)
        self._running: deque[tuple[Task, Issued]] = deque()
        self._waiting = False
        """True while the thread that waits has tasks, and looks for more by itself."""

    def open(self) -> None:
        self._issuing.open()
        self._ending.open()

    def start(self, task: Task) -> None:
        self._issuing.put(task)

    def close(self) -> None:
        self._issuing.close()
        self._ending.close()

    def _issue(self, task: Task) -> None:
        following: Task | None = task
        while following is not None:
            following, wakes = self._issue_one(following)
            if wakes:
                self._ending.put(None)

    def _issue_one(self, task: Task) -> tuple[Task | None, bool]:
        """Issue a task to the stream.

        Returns:
            the next task to issue, None if there is none; and whether to wake the thread that waits for ends.
        """
        driver = self._driver
        try:
            issued = self._streams.issue(task, [*before_on_device(task)])
        except BaseException as raised:
            task.start = task.end = driver.clock() - driver.origin
            with driver.lock:
                return driver.complete(task, None, raised, self), self._wakes()
        task.launched = driver.clock() - driver.origin
        with driver.lock:
            self._running.append((task, issued))
            return driver.issued(task, self), self._wakes()

    def _wakes(self) -> bool:
        """Test whether the caller has to wake the thread that waits for ends; if so, note that it is awake."""
        wakes = not self._waiting and self._is_due()
        self._waiting |= wakes
        return wakes

    def _wait(self, _: None) -> None:
        while self._report_batch():
            pass

    def _report_batch(self) -> bool:
        """Wait for the next batch of tasks and report their ends; return False if there is no batch."""
        with self._driver.lock:
            batch = self._next_batch() if self._is_due() else []
            self._waiting = bool(batch)
        if not batch:
            return False
        errors = [_error_of_waiting(issued) for _, issued in reversed(batch)]  # one wait, as a rule
        ended = [
            (task, *self._ended(task, issued, error))
            for (task, issued), error in zip(batch, reversed(errors), strict=True)
        ]
        with self._driver.lock:
            for task, value, error in ended:
                following = self._driver.complete(task, value, error, self)
                if following is not None:
                    self._issuing.put(following)
        return True

    def _ended(
        self, task: Task, issued: Issued, error: BaseException | None
    ) -> tuple[Any, BaseException | None]:
        """Set the start and end of a task that has ended; return its value and its error, at least one of them None.

        The error is `error` if that is not None, else the exception that reading the times or the value raises.
        """
        driver = self._driver
        value = None
        try:
            start, end = issued.span()
        except BaseException as raised:
            start = end = driver.clock()
            error = raised if error is None else error
        task.start, task.end = start - driver.origin, end - driver.origin
        if error is None:
            try:
                value = issued.value
            except BaseException as raised:
                error = raised
        return value, error

    def _next_batch(self) -> list[tuple[Task, Issued]]:
        """Take the oldest tasks, up to and including the first whose end the host needs; all if it needs none."""
        batch = []
        while self._running:
            batch.append(self._running.popleft())
            task = batch[-1][0]
            if task.waiter is not None or task.followers:
                break
        return batch

    def _is_due(self) -> bool:
        """Test whether to report ends: the host needs one, the lane has no next task, or there are `ENDS_TOGETHER`."""
        running = self._running
        if self._lane.running is None or len(running) >= ENDS_TOGETHER:
            return bool(running)
        for task, _ in running:  # noqa: SIM110 - a generator takes twice as long, for each task
            if task.waiter is not None or task.followers:
                return True
        return False


def _error_of_waiting(issued: Issued) -> BaseException | None:
    """Wait until a task that was issued to its stream has ended; return the error that it raised, None if none."""
    try:
        issued.wait()
    except BaseException as raised:
        return raised
    return None


_END = object()
"""The item that ends a queue's thread."""


class ThreadQueue:
    """A thread that processes items in the order in which they were added."""

    def __init__(self, name: str, work: Callable[[Any], None]) -> None:
        self._work = work
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: Any) -> None:
        """Add an item for the thread to process."""
        self._items.put(item)

    def close(self) -> None:
        """End the thread once it has processed the items in the queue."""
        self._items.put(_END)
        self._thread.join()

    def _run(self) -> None:
        for item in iter(self._items.get, _END):
            self._work(item)
