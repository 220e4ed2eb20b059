"""The virtual clock: runs the same policy coroutines over modelled durations, in integer nanoseconds.

Nothing sleeps. Time jumps from one task's end to the next; a coroutine goes on at the moment at which the handle that
it awaits settles. With sharing on, tasks that run at once and ask for more of a processor, memory or link than there
is slow each other down, max-min fairly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from moesched.drivers.observers import observers_of_ends
from moesched.drivers.policies import PolicyRun, results_of
from moesched.drivers.pricing import nanoseconds, no_garbage_collection
from moesched.drivers.rendezvous import Rendezvous
from moesched.drivers.sharing import IDLE, Shared, SharedApart
from moesched.engine import Engine
from moesched.errors import PolicyError
from moesched.seams import CostModel, Delay, Observer
from moesched.tasks import Lane, Task

Perform = Callable[[Task], Any]


class VirtualDriver:
    """Drives one engine per rank on one virtual clock.

    Args:
        engines: one for each rank.
        cost: turns a task's work into time and shares of resources.
        sharing: whether tasks that run at once slow each other down; those of one engine, as each has a machine.
        perform: what gives tasks of a type their value when they end; it may raise, which fails the task.
        observers: told of each task that ran, when it ends.
        delays: what makes the tasks of a lane longer than their work says.

    Attributes:
        now: nanoseconds since the driver was made.
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
    ) -> None:
        self.now = 0
        self._delays = delays or {}
        self._engines = list(engines)
        self._cost = cost
        self._perform = dict(perform or {})
        self._ended = observers_of_ends(observers)
        self._rendezvous = Rendezvous(self._engines)
        self._advance = self._advance_shared if sharing else self._advance_alone
        self._events: list[tuple[int, int, Task]] = []
        self._lanes = [lane for engine in self._engines for lane in engine.lanes]
        counts = [len(engine.lanes) for engine in self._engines]
        self._shared = Shared(counts[0]) if len(counts) == 1 else SharedApart(counts)
        self._started: list[Task] = []
        self._awaited: list[Task] = []
        self._owners: list[Engine] = []
        for engine in self._engines:
            engine.started, engine.awaited = self._started, self._awaited
            for lane in engine.lanes:
                lane.index = len(self._owners)
                self._owners.append(engine)

    def run(self, *mains: Coroutine[Task, Any, Any]) -> list[Any]:
        """Run one coroutine per rank to its end, and all tasks that they submitted; returns what they returned.

        Raises:
            the first error of a coroutine, after all have ended.
        """
        runs = [PolicyRun(main, rank) for rank, main in enumerate(mains)]
        ready = deque(runs)
        with no_garbage_collection():
            while True:
                while ready:
                    run = ready.popleft()
                    run.resume()
                    if run.done:
                        self._rendezvous.leave(run.rank, run.error)
                    elif run.awaited is not None:
                        self._engines[run.rank].policy_waits(run.awaited)
                self._advance()
                if not self._awaited:
                    stuck = next((run for run in runs if not run.done), None)
                    if stuck is None:
                        break
                    stuck.fail(
                        PolicyError(f"{stuck.awaited!r} can never run: nothing is left that could start it")
                    )
                    ready.append(stuck)
                ready.extend(task.waiter for task in self._awaited)
                self._awaited.clear()
        return results_of(runs)

    def _advance_alone(self) -> None:
        """Run tasks until a handle that somebody awaits has settled, or none is left."""
        events, started, awaited, owners = self._events, self._started, self._awaited, self._owners
        perform, ended, arrived = self._perform, self._ended, self._rendezvous.arrived
        now, cost, delays = self.now, self._cost, self._delays
        while True:
            while started:
                task = started.pop()
                task.start = now
                lane = task.lane
                duration = task.work.nanoseconds
                if duration < 0:
                    duration = nanoseconds(task.work, cost)
                if delays and lane in delays:
                    duration += delays[lane](task, now)
                lane.busy += duration
                heappush(events, (now + duration, lane.index, task))
            if arrived:
                self._rendezvous.collect()
                continue
            if awaited or not events:
                return
            now, index, task = heappop(events)
            self.now = task.end = now
            if type(task) in perform:
                _act(owners[index], task, perform)
            else:
                owners[index].finish(task)
            ended(task)

    def _advance_shared(self) -> None:
        """The same, with tasks that run at once sharing what they use."""
        shared, started, awaited, owners = self._shared, self._started, self._awaited, self._owners
        perform, ended, arrived = self._perform, self._ended, self._rendezvous.arrived
        cost, lanes, delays = self._cost, self._lanes, self._delays
        while True:
            for task in started:
                work = task.work
                if work.nanoseconds < 0:
                    nanoseconds(work, cost)
                lane = task.lane
                task.start = self.now + work.lead
                longer = delays[lane](task, self.now) if delays and lane in delays else 0
                shared.start(lane.index, work, longer)
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
            assert lane.running is not None
            task = lane.running
            self.now = task.end = shared.now
            lane.busy += task.end - task.start
            if type(task) in perform:
                _act(owners[index], task, perform)
            else:
                owners[index].finish(task)
            ended(task)


def _act(engine: Engine, task: Task, perform: Mapping[type[Task], Perform]) -> None:
    try:
        value = perform[type(task)](task)
    except Exception as error:
        engine.fail(task, error)
    else:
        engine.finish(task, value)
