"""Sharing of processors, memories and links among the tasks that run at once: max-min fair, and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, inf, prod

from moesched.seams import Demand, at_once
from moesched.tasks import Work

IDLE = -1


def fair_rates(demands: Sequence[Demand]) -> tuple[float, ...]:
    """How fast each task runs, relative to running alone.

    All rates rise together from 0. When a resource is used up, the tasks that use it keep their rate and the others
    rise on, until each is at 1 or held by a resource. Where it was measured how much some sorts of work slow another,
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
        if demand.slowed:
            others = [each.sort for other, each in enumerate(demands) if other != index and each.sort]
            rates[index] *= _speed_beside(others, dict(demand.slowed))
    return tuple(rates)


def _speed_beside(others: Sequence[str], slowed: Mapping[str, float]) -> float:
    """As measured beside all of them at once, else as if each one slowed what the others have left."""
    measured = slowed.get(at_once(others))
    return prod(slowed.get(each, 1.0) for each in others) if measured is None else measured


class _Mix:
    """Kinds of work that run at once, by lane, and how fast each of them goes.

    Attributes:
        kinds: what runs on each lane, `IDLE` for nothing.
        rates: how fast, relative to running alone.
        following: what it becomes when a lane takes up or ends a kind.
        slower: by how much the lanes are slower in another mix, for those that are not as fast.
    """

    __slots__ = ("following", "kinds", "rates", "slower")

    def __init__(self, kinds: tuple[int, ...], rates: tuple[float, ...]) -> None:
        self.kinds = kinds
        self.rates = rates
        self.following: dict[int, _Mix] = {}
        self.slower: dict[_Mix, list[tuple[int, float]]] = {}


class Shared:
    """When the tasks that run will end, as far as one can tell without knowing what starts meanwhile.

    Schedules have few mixes of works, so that all rates, and what they change by, are soon only looked up.

    Args:
        lanes: how many lanes there are.

    Attributes:
        now: when the last task ended; nanoseconds.
    """

    def __init__(self, lanes: int) -> None:
        self.now = 0
        self._ends = [inf] * lanes
        self._kinds: dict[Work, int] = {}
        self._demands: list[Demand] = []
        self._mixes: dict[tuple[int, ...], _Mix] = {}
        self._mix = self._rated = self._mix_of((IDLE,) * lanes)

    def start(self, lane: int, work: Work) -> None:
        """A lane takes up a work, whose time alone is known."""
        kind = self._kinds.get(work, IDLE)
        if kind == IDLE:
            kind = self._kinds[work] = self._kind(work.demand)
        self._ends[lane] = self.now + work.nanoseconds / self._rated.rates[lane]
        self._change(lane, kind)

    def next_end(self) -> float:
        """When the next task will end if nothing starts meanwhile; infinity when nothing runs."""
        if self._mix is not self._rated:
            self._rate()
        return min(self._ends)

    def end_next(self) -> int:
        """Move on to the next end of a task; returns its lane, or `IDLE` when nothing runs."""
        if self._mix is not self._rated:
            self._rate()
        ends = self._ends
        end = min(ends)
        if end == inf:
            return IDLE
        lane = ends.index(end)
        if end > self.now:
            self.now = ceil(end)
        ends[lane] = inf
        self._change(lane, IDLE)
        return lane

    def _change(self, lane: int, kind: int) -> None:
        """Note what a lane does from now on."""
        mix = self._mix
        change = kind * len(self._ends) + lane
        following = mix.following.get(change)
        if following is None:
            following = self._mix_of((*mix.kinds[:lane], kind, *mix.kinds[lane + 1 :]))
            mix.following[change] = following
        self._mix = following

    def _rate(self) -> None:
        """Have all ends be as they will if what runs now goes on: so far they are for the rates of another mix."""
        before, mix = self._rated, self._mix
        slower = before.slower.get(mix)
        if slower is None:
            ratios = [old / new for old, new in zip(before.rates, mix.rates, strict=True)]
            slower = [(lane, ratio) for lane, ratio in enumerate(ratios) if ratio != 1.0]
            before.slower[mix] = slower
        ends, now = self._ends, self.now
        for lane, ratio in slower:
            left = ends[lane] - now
            if left > 0:
                ends[lane] = now + left * ratio
        self._rated = mix

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
        """Works that ask for the same shares are of one kind, whatever their time."""
        for kind, known in enumerate(self._demands):
            if known[1:] == demand[1:]:
                return kind
        self._demands.append(demand)
        return len(self._demands) - 1


class SharedApart:
    """Several machines on one clock, each with resources of its own: what runs on one slows nothing on another.

    Used like a `Shared`. Lanes are numbered through, machine after machine.

    Args:
        lanes: how many each machine has.
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

    def start(self, lane: int, work: Work) -> None:
        """A lane takes up a work, whose time alone is known."""
        machine, own = self._places[lane]
        machine.now = self.now
        machine.start(own, work)

    def end_next(self) -> int:
        """Move on to the next end of a task; returns its lane, or `IDLE` when nothing runs."""
        soonest = min(self._machines, key=Shared.next_end)
        lane = soonest.end_next()
        if lane == IDLE:
            return IDLE
        self.now = max(self.now, soonest.now)
        return self._firsts[soonest] + lane
