"""Sharing of processors, memories and links among concurrent tasks: max-min fair, with measured slowdowns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, inf, prod

from moesched.machines.demand import Demand, at_once
from moesched.tasks import Work

IDLE = -1


def fair_rates(demands: Sequence[Demand]) -> tuple[float, ...]:
    """The rate of each task, relative to running alone.

    All rates rise together from 0. When a resource is used up, the tasks that use it keep their rate, and the others
    rise further, until each is at 1 or limited by a resource. Then measured slowdowns of some sorts of work by others
    apply.
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
            others = [each.sort for other, each in enumerate(demands) if other != index and each.sort]
            rates[index] *= _speed_beside(others, dict(demand.slowed))
    return tuple(rates)


def _speed_beside(others: Sequence[str], slowed: Mapping[str, float]) -> float:
    """The measured speed beside all of them at once, or else the product of the speeds beside each one."""
    measured = slowed.get(at_once(others))
    return prod(slowed.get(each, 1.0) for each in others) if measured is None else measured


class _Mix:
    """The kinds of work that run at once, by lane, and their rates.

    Attributes:
        kinds: the kind of work on each lane; `IDLE` for none.
        rates: the rate of each lane, relative to running alone.
        started: by lane, the mix after it starts a kind of work.
        ended: by lane, the mix after its work ends; None until it was needed.
        slower: for another mix, the lanes whose rate differs there, with the ratio of the rates.
    """

    __slots__ = ("ended", "kinds", "rates", "slower", "started")

    def __init__(self, kinds: tuple[int, ...], rates: tuple[float, ...]) -> None:
        self.kinds = kinds
        self.rates = rates
        self.started: list[dict[int, _Mix]] = [{} for _ in kinds]
        self.ended: list[_Mix | None] = [None for _ in kinds]
        self.slower: dict[_Mix, list[tuple[int, float]]] = {}


class Shared:
    """The ends of the running tasks, assuming that no other task starts before.

    A schedule has few mixes of works, so rates and their ratios are computed once for each mix and then looked up.

    Args:
        lanes: number of lanes.

    Attributes:
        now: the end of the last task, in nanoseconds.
    """

    def __init__(self, lanes: int) -> None:
        self.now = 0
        self._ends = [inf] * lanes
        self._kinds: dict[Work, int] = {}
        self._demands: list[Demand] = []
        self._mixes: dict[tuple[int, ...], _Mix] = {}
        self._mix = self._rated = self._mix_of((IDLE,) * lanes)

    def start(self, lane: int, work: Work, longer: int = 0) -> None:
        """Start a work on a lane.

        Args:
            work: one whose time alone is known.
            longer: extra nanoseconds that it takes this time.
        """
        try:
            kind = self._kinds[work]
        except KeyError:
            kind = self._kinds[work] = self._kind(work.demand)
        self._ends[lane] = self.now + (work.nanoseconds + longer) / self._rated.rates[lane]
        started = self._mix.started[lane]
        try:
            self._mix = started[kind]
        except KeyError:
            self._mix = started[kind] = self._changed(lane, kind)

    def next_end(self) -> float:
        """The end of the next task if no other starts before; infinity when nothing runs.

        Ends were computed with the rates of another mix, if works have started or ended since.
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
        """Advance to the next end of a task; returns its lane, or `IDLE` when nothing runs."""
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
        """The mix in which a lane runs another kind of work."""
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
        """The kind of a demand: demands for the same shares are of one kind, whatever their time."""
        for kind, known in enumerate(self._demands):
            if known[1:] == demand[1:]:
                return kind
        self._demands.append(demand)
        return len(self._demands) - 1


def _slower(before: _Mix, mix: _Mix) -> list[tuple[int, float]]:
    """The lanes whose rates differ between two mixes, with the ratios."""
    ratios = [old / new for old, new in zip(before.rates, mix.rates, strict=True)]
    return [(lane, ratio) for lane, ratio in enumerate(ratios) if ratio != 1.0]


class SharedApart:
    """Several machines on one clock, whose tasks do not slow each other: each machine has its own resources.

    Used like a `Shared`. Lanes are numbered machine after machine.

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
        """Start a work on a lane.

        Args:
            work: one whose time alone is known.
            longer: extra nanoseconds that it takes this time.
        """
        machine, own = self._places[lane]
        machine.now = self.now
        machine.start(own, work, longer)

    def end_next(self) -> int:
        """Advance to the next end of a task; returns its lane, or `IDLE` when nothing runs."""
        soonest = min(self._machines, key=Shared.next_end)
        lane = soonest.end_next()
        if lane == IDLE:
            return IDLE
        self.now = max(self.now, soonest.now)
        return self._firsts[soonest] + lane
