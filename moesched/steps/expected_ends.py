"""Expected ends of submitted tasks, found by simulating the lanes with the times of a cost model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from moesched.stream_edges import followers_on_device
from moesched.tasks import DONE, RUNNING, Join, Lane, Task, Work

Price = Callable[[Work], int]
"""Returns the nanoseconds that a task with this `Work` (FLOPs and bytes) takes if it runs alone."""


class ExpectedEnds(NamedTuple):
    """Expected ends, in nanoseconds, of the tasks that have not ended, and of lanes.

    Attributes:
        tasks: the end of each task, by `Task.id`.
        lanes: the end of the last such task of each lane that has any.
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
    ends = _Lookahead(tasks, price).play(now)
    last: dict[Lane, int] = {}
    for number, end in ends.items():
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

    A lane runs one task at a time. Of the ready ones, it takes the one with the lowest `Task.key`, its priority.
    """

    def __init__(self, tasks: Mapping[int, Task], price: Price) -> None:
        self._tasks = tasks
        self._price = price
        self._later = {
            number: list(dict.fromkeys(each.id for each in _waiting_for(task)))
            for number, task in tasks.items()
        }
        self._keep_order()
        self._waits = Counter(chain.from_iterable(self._later.values()))
        self._ready: defaultdict[Lane, list[tuple[int, int]]] = defaultdict(list)
        self._running: dict[Lane, int] = {}
        self._events: list[tuple[int, int]] = []

    def play(self, now: int) -> dict[int, int]:
        """Run the simulation from the time `now`; returns the end of each task in nanoseconds, by `Task.id`."""
        ends: dict[int, int] = {}
        first = [number for number in self._tasks if not self._waits[number]]
        for number in sorted(first, key=lambda number: self._tasks[number].state != RUNNING):
            self._add(number, now)
        while self._events:
            now, number = heappop(self._events)
            ends[number] = now
            lane = self._tasks[number].lane
            for later in self._later[number]:
                self._waits[later] -= 1
                if not self._waits[later]:
                    self._add(later, now)
            del self._running[lane]
            self._start_next(lane, now)
        return ends

    def _keep_order(self) -> None:
        """Add edges so that each task of an in-order lane waits for the task before it on that lane."""
        last: dict[Lane, int] = {}
        for number in sorted(self._tasks):
            lane = self._tasks[number].lane
            if lane.in_order:
                if lane in last:
                    self._later[last[lane]].append(number)
                last[lane] = number

    def _add(self, number: int, now: int) -> None:
        task = self._tasks[number]
        heappush(self._ready[task.lane], (task.key, number))
        self._start_next(task.lane, now)

    def _start_next(self, lane: Lane, now: int) -> None:
        ready = self._ready[lane]
        if lane in self._running or not ready:
            return
        _, number = heappop(ready)
        task = self._tasks[number]
        takes = 0 if isinstance(task, Join) else self._price(task.work)
        started = task.start if task.state == RUNNING and task.start >= 0 else now
        self._running[lane] = number
        heappush(self._events, (max(now, started + takes), number))
