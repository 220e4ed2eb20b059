"""The climb from a policy's sizes with the best bound to better ones, whose schedules are simulated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress

from moesched.errors import BadInput
from moesched.planner.schedules import Point, Schedules, Seen, resident_of
from moesched.planner.search import PolicyChoice, filled
from moesched.planner.setting import Setting
from moesched.planner.traits import Shape, Traits

MOST_PREVIEWS = 8
NEAR = 1.1
"""Factor by which a schedule may beat its bound, which assumes that all prompts have the average length."""
ALIKE = 1.02
"""Factor by which the bound of a better schedule may be lower, for other sizes with the same part of the KV cache on
the accelerator: they lie below their bounds by as much."""


class Climb:
    """Steps between sizes of one policy.

    Args:
        ladder: allowed sizes of micro-batches, in ascending order.
        shape_of: returns the costs of micro-batches of a size.
    """

    def __init__(
        self,
        setting: Setting,
        traits: Traits,
        schedules: Schedules,
        ladder: Sequence[int],
        shape_of: Callable[[int], Shape],
    ) -> None:
        self._setting = setting
        self._traits = traits
        self._schedules = schedules
        self._ladder = ladder
        self._shape_of = shape_of

    def from_choice(self, start: PolicyChoice) -> Seen:
        """Move from one schedule to a better one: in large steps first, then in small ones."""
        found = self.start(start)
        for around in (self._far, self._near):
            found = self._uphill(found, around)
        return found

    def _uphill(self, found: Seen, around: Callable[[Seen], list[Point]]) -> Seen:
        """Move on, until no neighbour's bound is as high, or enough of them were tried."""
        tried: set[Point] = set()
        ahead = self._ahead(found, around(found))
        while ahead and len(tried) < MOST_PREVIEWS:
            choice = ahead.pop(0)
            if point_of(choice) in tried:
                continue
            tried.add(point_of(choice))
            with suppress(BadInput):
                other = self._schedules.see(*point_of(choice))
                if other.rate > found.rate:
                    found = other
                    ahead = self._ahead(found, around(found))
        return found

    def _ahead(self, found: Seen, points: Sequence[Point]) -> list[PolicyChoice]:
        """The choices that fit and may be better than a schedule, the highest bound first."""
        choices = [choice for point in points if (choice := self._filled(point))]
        here = self._filled(found.point)
        bound = found.throughput if here is None else here.throughput

        def may_be_better(choice: PolicyChoice) -> bool:
            alike = choice.resident == resident_of(self._share(found), choice.micro_batches)
            return choice.throughput >= (bound / ALIKE if alike else found.throughput / NEAR)

        return sorted(filter(may_be_better, choices), key=lambda choice: choice.throughput, reverse=True)

    def start(self, choice: PolicyChoice) -> Seen:
        """Simulate a choice; with smaller micro-batches if not even one fits: the search knows only average lengths."""
        size, count, resident = point_of(choice)
        smaller = [other for other in reversed(self._ladder) if other < size]
        for other in smaller:
            try:
                return self._schedules.see(size, count, resident)
            except BadInput:
                share = resident / count
                size, count = other, -(-choice.micro_batch_size * choice.micro_batches // other)
                resident = resident_of(share, count)
        return self._schedules.see(size, count, resident)

    def _far(self, seen: Seen) -> list[Point]:
        """Micro-batches of about twice and half the size, for as many requests."""
        size = seen.micro_batch_size
        others = {min(self._ladder, key=lambda each: abs(each - aim)) for aim in (2 * size, size / 2)}
        return self._of_sizes(seen, sorted(others - {size}))

    def _near(self, seen: Seen) -> list[Point]:
        """A fifth more or fewer micro-batches, or other sizes for as many requests; more or less of the KV cache there.

        The share of the KV cache on the accelerator changes by a tenth of the micro-batches, or of a single one's
        layers; or that tenth is added, where the host's memory has no room for more.
        """
        (size, count, _), share = seen.point, self._share(seen)
        points = [
            Point(size, other, resident_of(share, other))
            for other in (-(-count * 6 // 5), max(1, count * 5 // 6))
        ]
        points += self._of_sizes(seen, self._neighbours(size))
        if self._setting.splits_kv and self._setting.kv_on_gpu is None:
            parts = self._setting.layout.config.layers if count == 1 else count
            here, few = round(share * parts), -(-parts // 10)
            points += [
                Point(size, count, resident_of(other / parts, count))
                for other in (max(0, here - few), min(parts, here + few))
            ]
            if count > 1:
                points.append(Point(size, count + few, here + few))
        return points

    def _of_sizes(self, seen: Seen, sizes: Sequence[int]) -> list[Point]:
        """Micro-batches of these sizes for as many requests, with the same share of the KV cache on the accelerator."""
        counts = [(size, -(-seen.batch_size // size)) for size in sizes]
        return [Point(size, count, resident_of(self._share(seen), count)) for size, count in counts]

    def _share(self, seen: Seen) -> float:
        return seen.kv_on_gpu if self._setting.splits_kv else 0.0

    def _filled(self, point: Point) -> PolicyChoice | None:
        """That number of micro-batches, or the most that should fit, with as many weights kept as then fit."""
        shape = self._shape_of(point.size)

        def with_count(count: int) -> PolicyChoice | None:
            return filled(self._setting, self._traits, shape, count, min(point.resident, count))

        counts = range(1, min(point.micro_batches, shape.most) + 1)
        most = bisect_left(counts, True, key=lambda count: with_count(count) is None)
        return with_count(most) if most else None

    def _neighbours(self, size: int) -> list[int]:
        place = self._ladder.index(size)
        return [*self._ladder[place + 1 : place + 3], *self._ladder[max(0, place - 2) : place]]


def point_of(choice: PolicyChoice) -> Point:
    """Its sizes."""
    return Point(choice.micro_batch_size, choice.micro_batches, choice.resident)
