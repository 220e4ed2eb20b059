"""Sharing of processors, memories and links among the tasks that run at once: max-min fair, and as measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from moesched.cost import Demand
from moesched.tasks import Task


def fair_rates(demands: Sequence[Demand]) -> tuple[float, ...]:
    """How fast each task runs, relative to running alone.

    All rates rise together from 0. When a resource is used up, the tasks that use it keep their rate and the others
    rise on, until each is at 1 or held by a resource. Where it was measured how much one sort of work slows another,
    that comes on top.
    """
    rates = [0.0] * len(demands)
    rising = set(range(len(demands)))
    left: dict[str, float] = {}
    for demand in demands:
        for resource, _ in demand.shares:
            left[resource] = 1.0
    level = 0.0
    while rising:
        asked: dict[str, float] = {}
        for index in rising:
            for resource, share in demands[index].shares:
                if share > 0:
                    asked[resource] = asked.get(resource, 0.0) + share
        rise = min([1.0 - level, *(left[resource] / total for resource, total in asked.items())])
        level += rise
        for resource, total in asked.items():
            left[resource] -= rise * total
        used_up = {resource for resource, total in asked.items() if left[resource] <= 1e-12}
        held = {
            i
            for i in rising
            if level >= 1.0 - 1e-12 or any(s > 0 and r in used_up for r, s in demands[i].shares)
        }
        for index in held:
            rates[index] = min(level, 1.0)
        rising -= held
    for index, demand in enumerate(demands):
        slowed = dict(demand.slowed)
        for other, beside in enumerate(demands):
            if other != index:
                rates[index] *= slowed.get(beside.sort, 1.0)
    return tuple(rates)


class Shared:
    """The tasks that run, and when the next one of them ends.

    Rates are remembered by the kinds of work that run together, of which a schedule has few.
    """

    def __init__(self) -> None:
        self.now = 0
        self._tasks: list[Task] = []
        self._left: list[float] = []
        self._rates: Sequence[float] = ()
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._mixes: dict[tuple[Any, ...], int] = {}

    def start(self, tasks: Sequence[Task], now: int) -> None:
        """Tasks take their lanes."""
        if tasks:
            self._pass(now)
            self._tasks += tasks
            for task in tasks:
                if task.work.mix < 0:
                    task.work.mix = self._mixes.setdefault(task.work.demand[1:], len(self._mixes))
            self._left += [task.work.nanoseconds for task in tasks]
            self._share()

    def end_next(self) -> Task | None:
        """Move on to the next end of a task; `now` says when that is."""
        if not self._tasks:
            return None
        ends = [left / rate for left, rate in zip(self._left, self._rates, strict=True)]
        soonest = min(ends)
        index = ends.index(soonest)
        self._pass(self.now + ceil(soonest))
        del self._left[index]
        task = self._tasks.pop(index)
        if self._tasks:
            self._share()
        return task

    def _pass(self, now: int) -> None:
        passed = now - self.now
        if passed:
            self._left = [
                max(0.0, left - passed * rate) for left, rate in zip(self._left, self._rates, strict=True)
            ]
            self.now = now

    def _share(self) -> None:
        kinds = tuple([task.work.mix for task in self._tasks])
        rates = self._known.get(kinds)
        if rates is None:
            rates = self._known[kinds] = fair_rates([task.work.demand for task in self._tasks])
        self._rates = rates
