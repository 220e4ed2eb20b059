"""Real time: runs policy coroutines on an event loop while lanes run their tasks beside it.

Lanes are worker threads, guests on others' threads, device streams, awaitables, or the loop itself. They finish tasks
under the engine's lock and take the next one themselves; the loop hears only of handles that a policy awaits, since a
trip through it costs more than most tasks.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, TypeVar

from moesched.drivers.lanes import (
    AwaitableRunner,
    Clock,
    Execute,
    LaneKind,
    LoopRunner,
    Runner,
    StreamRunner,
    Streams,
    ThreadRunner,
)
from moesched.drivers.policies import PolicyRun, results_of
from moesched.drivers.rendezvous import Rendezvous
from moesched.engine import Engine
from moesched.errors import TaskCancelled
from moesched.seams import Observer
from moesched.tasks import Block, Lane, Task

T = TypeVar("T", bound=Task)

SWITCH_INTERVAL_SECONDS = 0.0005
"""Python's default of 5 ms lets a busy policy starve the lanes."""

COLLECT_AFTER = 50_000
"""New lists and such before the garbage collector looks at them; after Python's 700 it takes a tenth of the time."""


class SharedEngine(Engine):
    """An engine that a policy submits to while lanes finish tasks on other threads."""

    def __init__(self, lanes: Iterable[Lane], *, halt_on_failure: bool = True) -> None:
        super().__init__(lanes, halt_on_failure=halt_on_failure)
        self.lock: Any = threading.Lock()
        self.dispatch: Callable[..., object] = lambda *_: None
        self.now: Callable[[], int] = lambda: 0
        self.policy_since = 0
        """When the policy could go on: the end of what it awaited, or the last time that a lane waited for it."""
        self._submit_locked: Callable[..., Any] = super().submit
        """What `submit` does while it holds the lock, looked up once: `super()` would cost as much as the lock."""

    def submit(
        self,
        task: T,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        transfer_class: int = 0,
    ) -> T:
        lock = self.lock
        lock.acquire()  # `with` would make a method of each call
        try:
            self._submit_locked(task, reads, writes, after, transfer_class)
            if self.started or self.arrived:
                self.dispatch(None, self._note_thought(task))
        finally:
            lock.release()
        return task

    def cancel(self, task: Task) -> bool:
        with self.lock:
            cancelled = super().cancel(task)
            self.dispatch()
        return cancelled

    def promote(self, task: Task, transfer_class: int) -> None:
        with self.lock:
            super().promote(task, transfer_class)

    def _note_thought(self, task: Task) -> int:
        """Note for a trace how long the policy took to submit a task that a lane was idle for; returns the time."""
        if self.submit_delays is None:
            return -1
        now = self.now()
        self.submit_delays.append((task.id, now - self.policy_since))
        self.policy_since = now
        return now


class RealtimeDriver:
    """Drives one engine per rank on this process's clock.

    Args:
        engines: one for each rank.
        execute: runs a task and returns its value; called where the task's lane runs.
        kinds: what each lane is, by its name; a worker thread where nothing is said.
        streams: the device whose streams the lanes of kind "stream" are.
        observers: told of each task that ran, when it ends.
        clock: what times are read from; a device that only imitates another one tells that one's time.
    """

    def __init__(
        self,
        engines: Sequence[SharedEngine],
        execute: Execute,
        *,
        kinds: Mapping[str, LaneKind] | None = None,
        streams: Streams | None = None,
        observers: Sequence[Observer] = (),
        clock: Clock = perf_counter_ns,
    ) -> None:
        self.clock = clock
        self.origin = clock()
        self.lock = threading.Lock()
        self._engines = list(engines)
        self._observers = [observer.ended for observer in observers]
        self._rendezvous = Rendezvous(self._engines)
        self._started: list[Task] = []
        self._awaited: list[Task] = []
        self._runs: list[PolicyRun] = []
        self._draining = False
        self._observer_error: BaseException | None = None
        self._over: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._owners: list[SharedEngine] = []
        self._runners: list[Runner] = []
        on_loop = LoopRunner(self, execute)
        for engine in self._engines:
            engine.started, engine.awaited, engine.lock = self._started, self._awaited, self.lock
            engine.dispatch, engine.now = self._dispatch, self._now
            for lane in engine.lanes:
                lane.index = len(self._owners)
                self._owners.append(engine)
                kind = (kinds or {}).get(lane.name, "thread")
                self._runners.append(
                    on_loop if kind == "loop" else self._runner(lane, kind, execute, streams)
                )

    @property
    def now(self) -> int:
        """Nanoseconds since the run began."""
        return self._now()

    def _now(self) -> int:
        return self.clock() - self.origin

    async def run(self, *mains: Coroutine[Task, Any, Any]) -> list[Any]:
        """Run one coroutine per rank to its end, and all tasks that they submitted; returns what they returned.

        A cancellation (Ctrl-C) withdraws what has not started, waits for what has, and goes on as CancelledError.

        Raises:
            an error of an observer, or else the first one of a coroutine, after all have ended.
        """
        self.origin = self.clock()
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._runs = [PolicyRun(main, rank) for rank, main in enumerate(mains)]
        runners = list(dict.fromkeys(self._runners))
        with _quiet_interpreter():
            for runner in runners:
                runner.open()
            try:
                for run in self._runs:
                    self._resume(run)
                await self._over
            except asyncio.CancelledError:
                await self._stop()
                raise
            finally:
                for runner in runners:
                    runner.close()
        if self._observer_error is not None:
            raise self._observer_error
        return results_of(self._runs)

    # -- on the loop -------------------------------------------------------------------------------

    def _resume(self, run: PolicyRun) -> None:
        engine = self._engines[run.rank]
        if run.awaited is not None:
            engine.policy_since = run.awaited.end
        run.resume()
        if run.awaited is not None:
            engine.policy_waits(run.awaited)
        if run.done:
            with self.lock:
                if run.error is not None:
                    engine.halt(run.error)
                self._rendezvous.leave(run.rank, run.error)
                self._draining = all(each.done for each in self._runs)
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
        self._over = self._loop.create_future()
        with self.lock:
            interrupted = TaskCancelled("the run was interrupted")
            for rank, engine in enumerate(self._engines):
                engine.halt(interrupted)
                self._rendezvous.leave(rank, interrupted)
        for run in self._runs:  # without the lock: a policy's `finally` may submit
            run.close()
        with self.lock:
            self._draining = True
            self._dispatch()
        await self._over

    # -- on any thread, with the lock held ---------------------------------------------------------

    def complete(
        self, task: Task, value: Any, error: BaseException | None, mine: Runner | None
    ) -> Task | None:
        """Tell the engine that a task ended and start what may start; returns the next task for the runner `mine`."""
        lane = task.lane
        lane.busy += task.end - task.start
        engine = self._owners[lane.index]
        if error is None:
            engine.finish(task, value)
        else:
            engine.fail(task, error)
        try:
            for observer in self._observers:
                observer(task)
        except BaseException as raised:
            self._give_up(raised)
        return self._dispatch(mine, task.end)

    def _give_up(self, error: BaseException) -> None:
        """An observer raised: it and the others hear nothing more, no further task starts, and the run raises that."""
        self._observer_error = error
        self._observers.clear()
        for engine in self._engines:
            engine.halt(error)

    def issued(self, task: Task, mine: Runner) -> Task | None:
        """Tell the engine that a stream took a task in; returns the next task for the runner `mine`."""
        self._owners[task.lane.index].issued(task)
        return self._dispatch(mine)

    def _dispatch(self, mine: Runner | None = None, since: int = -1) -> Task | None:
        """Hand started tasks to their lanes, and settled ones that are awaited to the loop.

        since: when they might have started: at the end of the task that they waited for, or at their submission; -1
            where nobody asks.
        """
        if self._rendezvous.arrived:
            self._rendezvous.collect()
        kept = guest = None
        started = self._started
        if started:
            for task in started:
                task.taken = since
                runner = self._runners[task.lane.index]
                if runner is mine and kept is None:  # lanes of the loop have one runner
                    kept = task
                elif runner.guest and guest is None and mine is not None and mine.host:
                    guest = task
                else:
                    runner.start(task)
            started.clear()
            if guest is not None:
                if kept is None:
                    kept = guest
                else:
                    self._runners[guest.lane.index].start(guest)
        if self._awaited:
            self._loop.call_soon_threadsafe(self._wake, self._awaited[:])
            self._awaited.clear()
        if self._draining and not any(engine.unsettled for engine in self._engines):
            self._loop.call_soon_threadsafe(self._end)
        return kept

    def _runner(self, lane: Lane, kind: LaneKind, execute: Execute, streams: Streams | None) -> Runner:
        if kind == "awaitable":
            return AwaitableRunner(self, execute)
        if kind == "stream":
            assert streams is not None, "lanes of kind stream need the device that has the streams"
            return StreamRunner(self, lane, streams)
        return ThreadRunner(self, lane, execute, guest=kind == "guest")


@contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """Threads that take turns more often, garbage that is looked for less often."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval, SWITCH_INTERVAL_SECONDS))
    gc.set_threshold(max(thresholds[0], COLLECT_AFTER) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
