"""Computes the max-min fair rates of concurrent tasks that share processors, memories and links.

Measured slowdowns of a machine, if there are any, are applied to these rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, inf, prod

from moesched.machines.cost_model import at_once
from moesched.work import Demand, Work

IDLE = -1


def fair_rates(demands: Sequence[Demand]) -> tuple[float, ...]:
    """Return the speed of each concurrent task relative to running alone, from 0 to 1.

    All rates rise together from 0. When a resource is used up, the tasks that use it keep their rate, and the others
    rise further, until each is at 1 or limited by a resource. Then the machine's measured slowdowns, if any, apply.

    Args:
        demands: the share of each resource that each task takes when it runs alone.
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
        if demand.slowed:
            beside = (*demands[:index], *demands[index + 1 :])
            others = [each.work_class for each in beside if each.work_class]
            rates[index] *= _speed_beside(others, dict(demand.slowed))
    return tuple(rates)


def _speed_beside(others: Sequence[str], slowed: Mapping[str, float]) -> float:
    """Return the measured speed of one class of work beside other classes, relative to running alone.

    If `others` were not measured together, the result is the product of the speeds beside each one of them. A class
    that was not measured counts as 1.

    Args:
        others: names of the classes of work that run at the same time.
        slowed: measured speeds of the class, by the names of the other classes, joined by the function `at_once`.
    """
    measured = slowed.get(at_once(others))
    return prod(slowed.get(each, 1.0) for each in others) if measured is None else measured


class _Mix:
    """The kinds of work that run at once, one on each lane, and the rates at which they run.

    Attributes:
        kinds: for each lane, the kind of work that it runs, as a number; `IDLE` for none.
        rates: for each lane, the speed of its work relative to running alone.
        started: for each lane, the mixes that follow when the lane starts work, by the kind of that work.
        ended: for each lane, the mix that follows when its work ends; None until it is first needed.
        slower: for each mix that may follow, pairs (lane, rate in this mix / rate in the following mix) of the lanes
            whose rates differ.
    """

    __slots__ = ("ended", "kinds", "rates", "slower", "started")

    def __init__(self, kinds: tuple[int, ...], rates: tuple[float, ...]) -> None:
        self.kinds = kinds
        self.rates = rates
        self.started: list[dict[int, _Mix]] = [{} for _ in kinds]
        self.ended: list[_Mix | None] = [None for _ in kinds]
        self.slower: dict[_Mix, list[tuple[int, float]]] = {}


class Shared:
    """Computes the ends of running tasks, which slow each other down as they share the resources of one machine.

    A mix is the combination of the kinds of work that run at the same time, one on each lane. A schedule has few mixes,
    so rates and their ratios are computed once for each mix and then looked up.

    Args:
        lanes: number of lanes.

    Attributes:
        now: the time of the latest end of a task, in nanoseconds.
    """

    def __init__(self, lanes: int) -> None:
        self.now = 0
        self._ends = [inf] * lanes
        self._kinds: dict[Work, int] = {}
        self._demands: list[Demand] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._mixes: dict[tuple[int, ...], _Mix] = {}
        self._mix = self._rated = self._mix_of((IDLE,) * lanes)

    def start(self, lane: int, work: Work, longer: int = 0) -> None:
        """Start a task's work on a lane.

        Args:
            lane: the lane's index.
            work: the work; its `nanoseconds` and `demand` are set already.
            longer: extra nanoseconds that the work takes this time.
        """
        try:
            kind = self._kinds[work]
        except KeyError:
            assert work.demand is not None
            kind = self._kinds[work] = self._kind(work.demand)
        self._ends[lane] = self.now + (work.nanoseconds + longer) / self._rated.rates[lane]
        started = self._mix.started[lane]
        try:
            self._mix = started[kind]
        except KeyError:
            self._mix = started[kind] = self._changed(lane, kind)

    def next_end(self) -> float:
        """Return the nanoseconds at which the next task ends if no other starts before; infinity if nothing runs.

        If tasks have started or ended since the ends of running tasks were computed, these ends are adjusted first.
        """
        ends, before, mix = self._ends, self._rated, self._mix
        if mix is not before:
            try:
                slower = before.slower[mix]
            except KeyError:
                slower = before.slower[mix] = _slower(before, mix)
            now = self.now
            for lane, ratio in slower:
                left = ends[lane] - now
                if left > 0:
                    ends[lane] = now + left * ratio
            self._rated = mix
        return min(ends)

    def end_next(self) -> int:
        """Advance `now` to when the next task ends; return that task's lane, or `IDLE` if no task runs."""
        end = self.next_end()
        if end == inf:
            return IDLE
        ends = self._ends
        lane = ends.index(end)
        if end > self.now:
            self.now = ceil(end)
        ends[lane] = inf
        following = self._mix.ended[lane]
        if following is None:
            following = self._mix.ended[lane] = self._changed(lane, IDLE)
        self._mix = following
        return lane

    def _changed(self, lane: int, kind: int) -> _Mix:
        """Return the mix of work that follows when a lane begins work of this kind, or becomes idle (`IDLE`)."""
        kinds = self._mix.kinds
        return self._mix_of((*kinds[:lane], kind, *kinds[lane + 1 :]))

    def _mix_of(self, kinds: tuple[int, ...]) -> _Mix:
        mix = self._mixes.get(kinds)
        if mix is None:
            running = [lane for lane, kind in enumerate(kinds) if kind != IDLE]
            rates = [1.0] * len(kinds)
            for lane, rate in zip(
                running, fair_rates([self._demands[kinds[lane]] for lane in running]), strict=True
            ):
                rates[lane] = rate
            mix = self._mixes[kinds] = _Mix(kinds, tuple(rates))
        return mix

    def _kind(self, demand: Demand) -> int:
        """Return the number of the kind of work that has this demand; demands of one kind differ only in `seconds`."""
        kind = self._numbers.setdefault(demand[1:], len(self._demands))
        if kind == len(self._demands):
            self._demands.append(demand)
        return kind


def _slower(before: _Mix, mix: _Mix) -> list[tuple[int, float]]:
    """Return the lanes whose rates differ between two mixes, as pairs (lane, rate before / rate in `mix`)."""
    ratios = [old / new for old, new in zip(before.rates, mix.rates, strict=True)]
    return [(lane, ratio) for lane, ratio in enumerate(ratios) if ratio != 1.0]


class SharedApart:
    """Like `Shared`, but for several machines on one clock, each with resources of its own.

    Lanes are numbered machine after machine.

    Args:
        lanes: number of lanes of each machine.
    """

    def __init__(self, lanes: Sequence[int]) -> None:
        self.now = 0
        self._machines = [Shared(count) for count in lanes]
        self._places = [
            (machine, lane)
            for machine, count in zip(self._machines, lanes, strict=True)
            for lane in range(count)
        ]
        self._firsts = dict(zip(self._machines, accumulate(lanes, initial=0), strict=False))

    def start(self, lane: int, work: Work, longer: int = 0) -> None:
        """Start a task's work on a lane.

        Args:
            lane: the lane's index, counted over the lanes of all machines.
            work: the work; its `nanoseconds` and `demand` are set already.
            longer: extra nanoseconds that the work takes this time.
        """
        machine, own = self._places[lane]
        machine.now = self.now
        machine.start(own, work, longer)

    def end_next(self) -> int:
        """Advance `now` to when the next task ends; return that task's lane, or `IDLE` if no task runs."""
        soonest = min(self._machines, key=Shared.next_end)
        lane = soonest.end_next()
        if lane == IDLE:
            return IDLE
        self.now = max(self.now, soonest.now)
        return self._firsts[soonest] + lane
