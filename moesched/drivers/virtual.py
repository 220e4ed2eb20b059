"""The virtual driver: runs policy coroutines on a virtual clock, with task durations from a cost model.

Times are integer nanoseconds, and jump from one task's end to the next. A coroutine resumes at the time at which the
handle that it awaits settles. With sharing on, concurrent tasks slow each other down, max-min fairly, where together
they need more of a processor, memory or link than the machine has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import heappop, heappush
from typing import Any

from moesched.drivers.policies import PolicyCoroutine, results_of
from moesched.drivers.pricing import nanoseconds, no_garbage_collection
from moesched.drivers.rendezvous import Rendezvous
from moesched.drivers.sharing import IDLE, Shared, SharedApart
from moesched.engine import Engine
from moesched.errors import PolicyError
from moesched.machines.cost_model import CostModel
from moesched.seams import Delay, Observer
from moesched.tasks import Lane, Task

Perform = Callable[[Task], Any]


class VirtualDriver:
    """Drives one engine per rank on one virtual clock.

    Args:
        engines: one for each rank.
        cost: cost model, which gives a task's time and its shares of resources.
        sharing: whether concurrent tasks of one engine slow each other down; each engine has its own machine.
        perform: by type of task, a function that computes the value of a task of that type at its end; an error fails
            the task. Tasks of other types have the value None.
        observers: objects whose method `ended` is called with every task that ran, when the task ends.
        delays: by lane, a function of (task, time now) that gives the extra nanoseconds which a task of that lane
            takes.
        after_await: a function from a number of tasks to the seconds that a policy needs to submit them once an awaited
            task has ended; they start later by this time. None for no time.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        cost: CostModel,
        *,
        sharing: bool = False,
        perform: Mapping[type[Task], Perform] | None = None,
        observers: Sequence[Observer] = (),
        delays: Mapping[Lane, Delay] | None = None,
        after_await: Callable[[int], float] | None = None,
    ) -> None:
        # Engines know the clock and not the driver: so a run's tasks are freed without a collection.
        self._clock = clock = _Clock()
        self._delays = delays or {}
        self._after_await = after_await
        self._late = 0
        """Nanoseconds by which tasks that have just been submitted start later."""
        self._engines = list(engines)
        self._cost = cost
        self._perform = dict(perform or {})
        self._ended = _told_of_ends(observers)
        self._rendezvous = Rendezvous(self._engines)
        self._sharing = sharing
        self._events: list[tuple[int, int, Task]] = []
        self._lanes = [lane for engine in self._engines for lane in engine.lanes]
        counts = [len(engine.lanes) for engine in self._engines]
        self._shared = Shared(counts[0]) if len(counts) == 1 else SharedApart(counts)
        self._started: list[Task] = []
        self._awaited: list[Task] = []
        self._owners: list[Engine] = []
        for engine in self._engines:
            engine.started, engine.awaited = self._started, self._awaited
            engine.now, engine.look = clock.time, clock.look
            for lane in engine.lanes:
                lane.index = len(self._owners)
                self._owners.append(engine)

    @property
    def now(self) -> int:
        """Return the virtual time: nanoseconds since the driver was made."""
        return self._clock.now

    def run(self, *mains: Coroutine[Task, Any, Any]) -> list[Any]:
        """Run one coroutine per rank and all tasks that they submit; return the coroutines' results.

        Raises:
            Exception: the first error of a coroutine, after all have ended.
        """
        runs = [
            PolicyCoroutine(main, rank, engine.lanes)
            for rank, (main, engine) in enumerate(zip(mains, self._engines, strict=True))
        ]
        ready = deque(runs)
        advance = self._advance_shared if self._sharing else self._advance_alone
        with no_garbage_collection():
            while True:
                self._late = 0
                while ready:
                    run = ready.popleft()
                    self._resume(run)
                    if run.done:
                        self._rendezvous.leave(run.rank, run.error)
                    elif run.awaited is not None:
                        self._engines[run.rank].policy_waits(run.awaited)
                advance()
                if not self._awaited:
                    stuck = next((run for run in runs if not run.done), None)
                    if stuck is None:
                        break
                    stuck.fail(
                        PolicyError(f"{stuck.awaited!r} can never run: no task is left that could start it")
                    )
                    ready.append(stuck)
                ready.extend(task.waiter for task in self._awaited)
                self._awaited.clear()
        return results_of(runs)

    def _resume(self, run: PolicyCoroutine) -> None:
        """Resume a coroutine. If it has awaited a task, the tasks that it now submits start later."""
        if run.awaited is None or self._after_await is None:
            run.resume()
            return
        engine = self._engines[run.rank]
        before = engine.submitted
        run.resume()
        self._late = max(self._late, round(self._after_await(engine.submitted - before) * 1e9))

    def _advance_alone(self) -> None:
        """Run tasks, each at full speed, until a handle that a policy awaits has settled, or no task is left."""
        events, started, awaited, owners = self._events, self._started, self._awaited, self._owners
        perform, ended, arrived = self._perform, self._ended, self._rendezvous.arrived
        clock, cost, delays, late = self._clock, self._cost, self._delays, self._late
        now = clock.now
        while True:
            while started:
                task = started.pop()
                task.start = now + late
                lane = task.lane
                duration = task.work.nanoseconds
                if duration < 0:
                    duration = nanoseconds(task.work, cost)
                if delays and lane in delays:
                    duration += delays[lane](task, now)
                lane.busy += duration
                heappush(events, (now + late + duration, lane.index, task))
            late = 0
            if arrived:
                self._rendezvous.collect()
                continue
            if awaited or not events:
                return
            now, index, task = heappop(events)
            clock.now = task.end = now
            if type(task) in perform:
                _act(owners[index], task, perform)
            else:
                owners[index].finish(task)
            ended(task)

    def _advance_shared(self) -> None:
        """Run tasks, which share resources, until a handle that a policy awaits has settled, or no task is left."""
        shared, started, awaited, owners = self._shared, self._started, self._awaited, self._owners
        perform, ended, arrived = self._perform, self._ended, self._rendezvous.arrived
        clock, cost, lanes, delays, late = self._clock, self._cost, self._lanes, self._delays, self._late
        now = clock.now
        while True:
            for begun in started:
                work = begun.work
                if work.nanoseconds < 0:
                    nanoseconds(work, cost)
                lane = begun.lane
                begun.start = now + work.lead + late
                longer = delays[lane](begun, now) if delays and lane in delays else 0
                shared.start(lane.index, work, longer + late)
            late = 0
            started.clear()
            if arrived:
                self._rendezvous.collect()
                continue
            if awaited:
                return
            index = shared.end_next()
            if index == IDLE:
                return
            lane = lanes[index]
            task = lane.running
            assert task is not None
            clock.now = task.end = now = shared.now
            lane.busy += now - task.start
            if type(task) in perform:
                _act(owners[index], task, perform)
            else:
                owners[index].finish(task)
            ended(task)


class _Clock:
    """The virtual clock of a driver, in nanoseconds since the driver was made."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def time(self) -> int:
        """Return the time in nanoseconds."""
        return self.now

    def look(self) -> AbstractContextManager[int]:
        """Return a context that gives the time in nanoseconds; no task changes its state within it."""
        return nullcontext(self.now)


def _told_of_ends(observers: Sequence[Observer]) -> Callable[[Task], object]:
    """Return a function that passes an ended task to the `ended` method of all observers."""
    calls = [observer.ended for observer in observers]
    if len(calls) == 1:
        return calls[0]

    def tell(task: Task) -> None:
        for call in calls:
            call(task)

    return tell


def _act(engine: Engine, task: Task, perform: Mapping[type[Task], Perform]) -> None:
    try:
        value = perform[type(task)](task)
    except Exception as error:
        engine.fail(task, error)
    else:
        engine.finish(task, value)
