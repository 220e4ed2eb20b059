"""Expected ends of submitted tasks, found by simulating the lanes with the times of a cost model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from moesched.stream_edges import followers_on_device
from moesched.tasks import DONE, RUNNING, Join, Lane, Task
from moesched.work import Work

Price = Callable[[Work], int]
"""Returns the nanoseconds that a task with this `Work` (FLOPs and bytes) takes if it runs alone."""


class ExpectedEnds(NamedTuple):
    """Expected ends, in nanoseconds, of the tasks that have not ended, and of their lanes.

    Attributes:
        tasks: the end of each task, by `Task.id`.
        lanes: for each lane with such tasks, the end of the last one that is not cancelled.
    """

    tasks: dict[int, int]
    lanes: dict[Lane, int]


def expected_ends(lanes: Iterable[Lane], asked: Iterable[Task], now: int, price: Price) -> ExpectedEnds:
    """Compute the ends of the submitted tasks if nothing more is submitted.

    Each task takes as long as it would alone. Tasks that were issued to a device's stream are left out, unless they are
    among `asked`.

    Args:
        lanes: the lanes of the engine.
        asked: further tasks whose ends are wanted.
        now: the time now in nanoseconds; ends are on the same clock.
        price: returns the nanoseconds that a task takes, from its `Work`.
    """
    tasks = _unsettled(lanes, asked)
    ahead = _Lookahead(tasks, price)
    ends = ahead.play(now)
    last: dict[Lane, int] = {}
    for number, end in ends.items():
        if number in ahead.cancelled:
            continue
        lane = tasks[number].lane
        last[lane] = max(end, last.get(lane, now))
    return ExpectedEnds(ends, last)


def _unsettled(lanes: Iterable[Lane], asked: Iterable[Task]) -> dict[int, Task]:
    """Return tasks on lanes or in `asked` that have not ended, and all tasks that wait for these, by `Task.id`."""
    found: dict[int, Task] = {}
    to_visit = list(asked)
    for lane in lanes:
        to_visit += [task for _, task in lane.heap]
        to_visit += lane.queue
        if lane.running is not None:
            to_visit.append(lane.running)
    while to_visit:
        task = to_visit.pop()
        if task.state < DONE and task.id not in found:
            found[task.id] = task
            to_visit += _waiting_for(task)
    return found


def _waiting_for(task: Task) -> list[Task]:
    """Return the tasks that wait for `task`, whether in the engine on the host or on a device's stream."""
    return [*(task.followers or ()), *followers_on_device(task)]


class _Lookahead:
    """A simulation of the tasks that have not ended.

    A lane runs one task at a time: of the ready tasks, the one with the lowest `Task.key`, its priority. Joins (tasks
    that only link tasks to others), cancelled tasks, and tasks that need a cancelled task's result take no lane: they
    end as soon as all tasks that they wait for have ended.

    Attributes:
        cancelled: ids of the tasks that will not run.
    """

    def __init__(self, tasks: Mapping[int, Task], price: Price) -> None:
        self._tasks = tasks
        self._price = price
        self._later = {
            number: list(dict.fromkeys(each.id for each in _waiting_for(task)))
            for number, task in tasks.items()
        }
        self.cancelled: set[int] = set()
        for number in sorted(tasks):
            task = tasks[number]
            lost = task.cause is not None or not self.cancelled.isdisjoint(task.deps[: task.inputs])
            if lost and task.state < RUNNING:
                self.cancelled.add(number)
        self._keep_order()
        self._waits = Counter(chain.from_iterable(self._later.values()))
        self._ready: defaultdict[Lane, list[tuple[int, int]]] = defaultdict(list)
        self._running: dict[Lane, int] = {}
        self._events: list[tuple[int, int, int]] = []
        self._ends: dict[int, int] = {}

    def play(self, now: int) -> dict[int, int]:
        """Run the simulation from the time `now`; returns the end of each task in nanoseconds, by `Task.id`."""
        ended: list[int] = []
        first = [number for number in self._tasks if not self._waits[number]]
        for number in sorted(first, key=lambda number: self._tasks[number].state != RUNNING):
            self._release(number, now, ended)
        self._end(ended, now)
        while self._events:
            now, _, number = heappop(self._events)
            self._end([number], now)
            lane = self._tasks[number].lane
            del self._running[lane]
            self._start_next(lane, now)
        return self._ends

    def _keep_order(self) -> None:
        """Add edges so that each task of an in-order lane waits for those before it on that lane."""
        before: defaultdict[Lane, list[int]] = defaultdict(list)
        for number in sorted(self._tasks):
            lane = self._tasks[number].lane
            if not lane.in_order:
                continue
            if number not in self.cancelled:
                for other in before[lane]:
                    self._later[other].append(number)
                before[lane].clear()
            before[lane].append(number)

    def _end(self, ended: list[int], now: int) -> None:
        """End the tasks `ended` at the time `now`, and release each task that then waits for no other.

        A released task that needs no lane ends at this time as well: it is appended to `ended`.
        """
        for number in ended:
            self._ends[number] = now
            for later in self._later[number]:
                self._waits[later] -= 1
                if not self._waits[later]:
                    self._release(later, now, ended)

    def _release(self, number: int, now: int, ended: list[int]) -> None:
        """Queue a task, which no longer waits for another, on its lane.

        A join or a cancelled task needs no lane: it is appended to `ended` instead.
        """
        task = self._tasks[number]
        if number in self.cancelled or isinstance(task, Join):
            ended.append(number)
            return
        heappush(self._ready[task.lane], (task.key, number))
        self._start_next(task.lane, now)

    def _start_next(self, lane: Lane, now: int) -> None:
        ready = self._ready[lane]
        if lane in self._running or not ready:
            return
        _, number = heappop(ready)
        task = self._tasks[number]
        started = task.start if task.state == RUNNING and task.start >= 0 else now
        self._running[lane] = number
        heappush(self._events, (max(now, started + self._price(task.work)), lane.index, number))
