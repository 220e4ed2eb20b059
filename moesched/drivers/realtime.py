"""Real time: runs policy coroutines on an event loop while lanes run their tasks beside it.

A lane is a worker thread (most), the loop itself (tasks of a few microseconds), or an awaitable (network). Workers
finish tasks under the engine's lock and take the next one themselves; the loop hears only of handles that a policy
awaits, since a trip through it costs more than most tasks.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, Literal, TypeVar

from moesched.drivers.policies import PolicyRun
from moesched.drivers.rendezvous import Rendezvous
from moesched.engine import Engine
from moesched.errors import TaskCancelled
from moesched.seams import Observer
from moesched.tasks import Block, Lane, Task

T = TypeVar("T", bound=Task)
LaneKind = Literal["thread", "loop", "awaitable"]
Execute = Callable[[Task], Any]

SWITCH_INTERVAL_SECONDS = 0.0005
"""Python's default of 5 ms lets a busy policy starve the lanes."""

LOOP_SLICE_NANOSECONDS = 1_000_000
"""How long tasks on the loop may run before the loop gets its turn."""


class SharedEngine(Engine):
    """An engine that a policy submits to while lanes finish tasks on other threads."""

    submit_frames = 3

    def __init__(self, lanes: Iterable[Lane], *, halt_on_failure: bool = True) -> None:
        super().__init__(lanes, halt_on_failure=halt_on_failure)
        self.lock: Any = threading.Lock()
        self.dispatch: Callable[[], object] = lambda: None

    def submit(
        self,
        task: T,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        transfer_class: int = 0,
    ) -> T:
        with self.lock:
            super().submit(task, reads, writes, after, transfer_class)
            if self.started or self.arrived:
                self.dispatch()
        return task

    def cancel(self, task: Task) -> bool:
        with self.lock:
            cancelled = super().cancel(task)
            self.dispatch()
        return cancelled

    def lift(self, task: Task, transfer_class: int) -> None:
        with self.lock:
            super().lift(task, transfer_class)


class RealtimeDriver:
    """Drives one engine per rank on this process's clock.

    Args:
        engines: one for each rank.
        execute: runs a task and returns its value; called on the thread of the task's lane.
        kinds: what each lane is, by its name; a worker thread where nothing is said.
        observers: told of each task that ran, when it ends.
    """

    def __init__(
        self,
        engines: Sequence[SharedEngine],
        execute: Execute,
        *,
        kinds: Mapping[str, LaneKind] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._engines = list(engines)
        self._execute = execute
        self._observers = [observer.ended for observer in observers]
        self._rendezvous = Rendezvous(self._engines)
        self._lock = threading.Lock()
        self._started: list[Task] = []
        self._awaited: list[Task] = []
        self._origin = perf_counter_ns()
        self._loop_tasks: deque[Task] = deque()
        self._loop_scheduled = False
        self._pending: set[asyncio.Future[None]] = set()
        self._runs: list[PolicyRun] = []
        self._over: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._owners: dict[Lane, SharedEngine] = {}
        self._start: dict[Lane, Callable[[Task], None]] = {}
        self._workers: list[_Worker] = []
        for engine in self._engines:
            engine.started, engine.awaited, engine.lock = self._started, self._awaited, self._lock
            engine.dispatch = self._dispatch
            for lane in engine.lanes:
                self._owners[lane] = engine
                self._start[lane] = self._starter(lane, (kinds or {}).get(lane.name, "thread"))

    @property
    def now(self) -> int:
        """Nanoseconds since the driver was made."""
        return perf_counter_ns() - self._origin

    async def run(self, *mains: Coroutine[Task, Any, Any]) -> list[Any]:
        """Run one coroutine per rank to its end, and all tasks that they submitted; returns what they returned.

        A cancellation (Ctrl-C) withdraws what has not started, waits for what has, and goes on as CancelledError.

        Raises:
            the first error of a coroutine, after all have ended.
        """
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._runs = [PolicyRun(main, rank) for rank, main in enumerate(mains)]
        with _short_switch_interval():
            for worker in self._workers:
                worker.start()
            try:
                for run in self._runs:
                    self._resume(run)
                await self._over
            except asyncio.CancelledError:
                await self._stop()
                raise
            finally:
                for worker in self._workers:
                    worker.close()
        for run in self._runs:
            if run.error is not None:
                raise run.error
        return [run.result for run in self._runs]

    # -- on the loop -------------------------------------------------------------------------------

    def _resume(self, run: PolicyRun) -> None:
        run.resume()
        if run.done:
            with self._lock:
                if run.error is not None:
                    self._engines[run.rank].halt(run.error)
                self._rendezvous.leave(run.rank, run.error)
                self._dispatch()

    def _wake(self, settled: list[Task]) -> None:
        for task in settled:
            if task.waiter.awaited is task:
                self._resume(task.waiter)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def _stop(self) -> None:
        """Withdraw what has not started, and wait for what has."""
        with self._lock:
            interrupted = TaskCancelled("the run was interrupted")
            for rank, engine in enumerate(self._engines):
                engine.halt(interrupted)
                self._rendezvous.leave(rank, interrupted)
            self._dispatch()
        if any(engine.unsettled for engine in self._engines):
            self._over = self._loop.create_future()
            with self._lock:
                self._dispatch()
            await self._over
        for run in self._runs:
            run.close()

    def _run_on_loop(self) -> None:
        self._loop_scheduled = False
        tasks, execute, until = self._loop_tasks, self._execute, perf_counter_ns() + LOOP_SLICE_NANOSECONDS
        while tasks:
            self._complete(*self._run(tasks.popleft(), execute))
            if perf_counter_ns() > until:
                break
        if tasks and not self._loop_scheduled:
            self._loop_scheduled = True
            self._loop.call_soon(self._run_on_loop)

    async def _run_awaitable(self, task: Task) -> None:
        task.start = self.now
        value, error = None, None
        try:
            value = await self._execute(task)
        except Exception as raised:
            error = raised
        task.end = self.now
        self._complete(task, value, error)

    # -- on any thread -----------------------------------------------------------------------------

    def _run(self, task: Task, execute: Execute) -> tuple[Task, Any, BaseException | None]:
        origin = self._origin
        task.start = perf_counter_ns() - origin
        value, error = None, None
        try:
            value = execute(task)
        except BaseException as raised:
            error = raised
        task.end = perf_counter_ns() - origin
        return task, value, error

    def _complete(
        self, task: Task, value: Any, error: BaseException | None, mine: Lane | None = None
    ) -> Task | None:
        """Tell the engine that a task ended and start what may start; returns the next task of lane `mine`."""
        with self._lock:
            engine = self._owners[task.lane]
            task.lane.busy += task.end - task.start
            if error is None:
                engine.finish(task, value)
            else:
                engine.fail(task, error)
            for observer in self._observers:
                observer(task)
            return self._dispatch(mine)

    def _dispatch(self, mine: Lane | None = None) -> Task | None:
        """Hand started tasks to their lanes and settled ones to the loop. The lock is held."""
        if self._rendezvous.arrived:
            self._rendezvous.collect()
        kept = None
        if self._started:
            for task in self._started:
                if task.lane is mine:
                    kept = task
                else:
                    self._start[task.lane](task)
            self._started.clear()
        if self._awaited:
            self._loop.call_soon_threadsafe(self._wake, self._awaited[:])
            self._awaited.clear()
        elif (
            kept is None
            and not any(engine.unsettled for engine in self._engines)
            and all(r.done for r in self._runs)
        ):
            self._loop.call_soon_threadsafe(self._end)
        return kept

    def _starter(self, lane: Lane, kind: LaneKind) -> Callable[[Task], None]:
        if kind == "loop":
            return self._start_on_loop
        if kind == "awaitable":
            return self._start_awaitable
        worker = _Worker(self, lane)
        self._workers.append(worker)
        return worker.give

    def _start_on_loop(self, task: Task) -> None:
        self._loop_tasks.append(task)
        if not self._loop_scheduled:
            self._loop_scheduled = True
            self._loop.call_soon_threadsafe(self._run_on_loop)

    def _start_awaitable(self, task: Task) -> None:
        self._loop.call_soon_threadsafe(self._spawn, task)

    def _spawn(self, task: Task) -> None:
        running = asyncio.ensure_future(self._run_awaitable(task))
        self._pending.add(running)
        running.add_done_callback(self._pending.discard)


class _Worker:
    """The thread of one lane. `give` hands it a task; a raw lock is the cheapest way to wake a thread."""

    def __init__(self, driver: RealtimeDriver, lane: Lane) -> None:
        self._driver = driver
        self._lane = lane
        self._task: Task | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        self._thread = threading.Thread(target=self._work, name=f"lane {lane.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def give(self, task: Task) -> None:
        """Have the thread run a task; the lane must be idle."""
        self._task = task
        self._wake.release()

    def close(self) -> None:
        """End the thread once it is idle."""
        self._task = None
        self._wake.release()
        self._thread.join()

    def _work(self) -> None:
        driver, lane, wake = self._driver, self._lane, self._wake
        run, complete, execute = driver._run, driver._complete, driver._execute
        while True:
            wake.acquire()
            task = self._task
            if task is None:
                return
            while task is not None:
                task = complete(*run(task, execute), lane)


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
