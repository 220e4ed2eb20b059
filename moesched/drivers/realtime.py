"""The real-time driver: runs policy coroutines on an event loop, while lanes run tasks on threads or streams.

`lanes.py` describes the kinds of lanes, and runners, which run the lanes' tasks. Lanes finish tasks under the engine's
lock and take the next one themselves. The loop is woken only for handles that a policy awaits, since waking it costs
more than most tasks take.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from time import perf_counter_ns
from typing import Any, TypeVar

from moesched.drivers.lanes import (
    AwaitableRunner,
    Clock,
    Execute,
    LoopRunner,
    Runner,
    StreamRunner,
    ThreadRunner,
)
from moesched.drivers.policies import PolicyCoroutine, results_of
from moesched.drivers.rendezvous import Rendezvous
from moesched.engine import Engine
from moesched.errors import TaskCancelled
from moesched.seams import LaneKind, Observer, Streams
from moesched.tasks import Block, Lane, Task

T = TypeVar("T", bound=Task)
Check = Callable[[Task, Any], Any]

SWITCH_INTERVAL_SECONDS = 0.0005
"""Seconds between switches of threads; with Python's default of 5 ms, a busy policy starves the lanes."""

COLLECT_AFTER = 50_000
"""New objects between garbage collections; Python's default of 700 costs a tenth of a run's time."""


class SharedEngine(Engine):
    """An engine with a lock, so that a policy can submit tasks while lanes finish tasks on other threads."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        super().__init__(lanes)
        self.lock = threading.Lock()
        self.dispatch: Callable[..., object] = lambda *_: None
        self.policy_since = 0
        """Start of the next submit delay, in nanoseconds: the awaited task's end, or the last recorded submission."""
        self._submit_locked: Callable[..., Any] = super().submit
        """The inherited `submit`, looked up once, since `super()` in each call would take as long as the lock."""

    def submit(
        self,
        task: T,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        priority_class: int = 0,
    ) -> T:
        lock = self.lock
        lock.acquire()  # cheaper than `with`
        try:
            self._submit_locked(task, reads, writes, after, priority_class)
            if self.started or self.arrived:
                self.dispatch(None, self._note_submit_delay(task))
        finally:
            lock.release()
        return task

    def cancel(self, task: Task) -> bool:
        with self.lock:
            cancelled = super().cancel(task)
            self.dispatch()
        return cancelled

    def promote(self, task: Task, priority_class: int) -> None:
        with self.lock:
            super().promote(task, priority_class)

    def _note_submit_delay(self, task: Task) -> int:
        """Record, for traces, the time that the policy took to submit a task.

        The time counts from the later of two moments: the end of the task that the policy awaited last, and the
        previous recorded submission.

        Returns:
            the time now in nanoseconds; -1 if no trace is recorded.
        """
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
        execute: runs a task and returns its value; called on the thread of the task's lane.
        kinds: kind of each lane ("thread", "guest", "loop", "awaitable" or "stream"), by the lane's name; by default
            "thread".
        streams: the device that runs the tasks of lanes of kind "stream"; None if there are no such lanes.
        observers: objects whose method `ended` is called with every task that ran, when the task ends.
        checks: by verb, a function that gets a task and the value that `execute` or a stream gave for the task. It
            returns the value to keep; if the value is wrong, it raises an error, which ends the run.
        clock: source of times; emulated devices have clocks of their own.
    """

    def __init__(
        self,
        engines: Sequence[SharedEngine],
        execute: Execute,
        *,
        kinds: Mapping[str, LaneKind] | None = None,
        streams: Streams | None = None,
        observers: Sequence[Observer] = (),
        checks: Mapping[str, Check] | None = None,
        clock: Clock = perf_counter_ns,
    ) -> None:
        self.clock = clock
        self.origin = clock()
        self.lock = threading.Lock()
        self._engines = list(engines)
        self._observers = [observer.ended for observer in observers]
        self._checks = checks or {}
        self._rendezvous = Rendezvous(self._engines)
        self._started: list[Task] = []
        self._awaited: list[Task] = []
        self._runs: list[PolicyCoroutine] = []
        self._draining = False
        self._given_up: BaseException | None = None
        self._over: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._owners: list[SharedEngine] = []
        self._runners: list[Runner] = []
        on_loop = LoopRunner(self, execute)
        for engine in self._engines:
            engine.started, engine.awaited, engine.lock = self._started, self._awaited, self.lock
            engine.dispatch, engine.now, engine.look = self._dispatch, self._now, self._look
            for lane in engine.lanes:
                lane.index = len(self._owners)
                self._owners.append(engine)
                kind = (kinds or {}).get(lane.name, "thread")
                self._runners.append(
                    on_loop if kind == "loop" else self._runner(lane, kind, execute, streams)
                )

    @property
    def now(self) -> int:
        """Return the nanoseconds since the run began."""
        return self._now()

    def _now(self) -> int:
        return self.clock() - self.origin

    @contextmanager
    def _look(self) -> Iterator[int]:
        """Hold the engine's lock, so that no task changes its state, and yield the time in nanoseconds."""
        with self.lock:
            yield self._now()

    def describe_running(self) -> str:
        """Describe the tasks that run on lanes now; empty if there are none."""
        with self.lock:
            running = [lane.running for engine in self._engines for lane in engine.lanes if lane.running]
        return ", ".join(f"{task.label} on {task.lane.name}" for task in running)

    async def run(self, *mains: Coroutine[Task, Any, Any]) -> list[Any]:
        """Run one coroutine per rank and all tasks that they submit; return the coroutines' results.

        A cancellation (Ctrl-C) cancels the tasks that have not started and the awaitables that run, waits for the
        others, then raises CancelledError.

        Raises:
            Exception: an error of an observer or a check, or else the first error of a coroutine, after all have ended.
        """
        self.origin = self.clock()
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._runs = [
            PolicyCoroutine(main, rank, engine.lanes)
            for rank, (main, engine) in enumerate(zip(mains, self._engines, strict=True))
        ]
        with _quiet_interpreter(), ExitStack() as opened:
            for runner in dict.fromkeys(self._runners):
                runner.open()
                opened.callback(runner.close)
            try:
                self._loop.call_soon(self._begin)  # so that a policy's timeout cannot cancel this task
                await self._over
            except asyncio.CancelledError:
                await self._stop()
                raise
        if self._given_up is not None:
            for run in self._runs:
                run.error = None
            raise self._given_up
        return results_of(self._runs)

    # -- on the loop -------------------------------------------------------------------------------

    def _begin(self) -> None:
        for run in self._runs:
            if not run.done:  # by a cancellation
                self._resume(run)

    def _resume(self, run: PolicyCoroutine) -> None:
        engine = self._engines[run.rank]
        if run.awaited is not None:
            engine.policy_since = max(engine.policy_since, run.awaited.end)
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
        """Cancel the tasks that have not started, and the awaitables that run, and wait for the others.

        A further cancellation does not shorten the wait, since threads cannot be stopped.
        """
        self._over = self._loop.create_future()
        with self.lock:
            interrupted = TaskCancelled("the run was interrupted")
            for rank, engine in enumerate(self._engines):
                engine.halt(interrupted)
                self._rendezvous.leave(rank, interrupted)
        for runner in self._runners:
            if isinstance(runner, AwaitableRunner):
                runner.close()
        for run in self._runs:  # without the lock: a policy's `finally` may submit
            run.close()
        with self.lock:
            self._draining = True
            self._dispatch()
        while not self._over.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._over])

    # -- on any thread, with the lock held ---------------------------------------------------------

    def complete(
        self, task: Task, value: object, error: BaseException | None, mine: Runner | None
    ) -> Task | None:
        """Tell the engine that a task ended, and start the tasks that are ready now.

        Args:
            value: the task's value; not used if there is an error.
            error: the exception that the task raised; None if it succeeded.
            mine: the calling runner, if its thread can run a further task; else None.

        Returns:
            the next task for the runner `mine`; None if there is none.
        """
        lane = task.lane
        lane.busy += task.end - task.start
        engine = self._owners[lane.index]
        if error is None and task.verb in self._checks:
            value, error = self._checked(task, value)
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

    def _checked(self, task: Task, value: object) -> tuple[object, BaseException | None]:
        """Return the value to keep for a task, and the error with which the run ends: one of them is None."""
        try:
            return self._checks[task.verb](task, value), None
        except BaseException as wrong:
            self._give_up(wrong)
            return None, wrong

    def _give_up(self, error: BaseException) -> None:
        """End the run with an error of an observer or a check: stop calling observers, and halt the engines."""
        self._given_up = error
        self._observers.clear()
        for engine in self._engines:
            engine.halt(error)

    def issued(self, task: Task, mine: Runner) -> Task | None:
        """Tell the engine that a task was issued to its stream; return the next task for the runner `mine`, or None."""
        self._owners[task.lane.index].issued(task)
        return self._dispatch(mine)

    def _dispatch(self, mine: Runner | None = None, since: int = -1) -> Task | None:
        """Hand started tasks to their runners, and wake the event loop for settled tasks that a policy awaits.

        Args:
            mine: the calling runner; None if no runner calls.
            since: time in nanoseconds from which the started tasks could start: the end or the submission of a task; -1
                if not recorded.

        Returns:
            a task for the runner `mine`, which has to start it; None if there is none.
        """
        if self._rendezvous.arrived:
            self._rendezvous.collect()
        kept = guest = None
        started = self._started
        if started:
            for task in started:
                task.taken = since
                runner = self._runners[task.lane.index]
                if runner is mine and kept is None:  # lanes of kind "loop" share one runner
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
    """Have Python switch threads more often and collect garbage less often, within this context."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval, SWITCH_INTERVAL_SECONDS))
    gc.set_threshold(max(thresholds[0], COLLECT_AFTER) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
