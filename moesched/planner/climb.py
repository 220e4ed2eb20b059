"""Moves step by step from a policy's batch sizes to better ones nearby, by simulating the schedule of each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress

from moesched.errors import BadInput
from moesched.planner.chunks import CHUNK
from moesched.planner.schedules import Schedule, SchedulePoint, Schedules, resident_of, with_count
from moesched.planner.search import PolicyChoice, filled
from moesched.planner.setting import Setting
from moesched.planner.traits import SizeOption, Traits

MOST_PREVIEWS = 8
NEAR = 1.1
"""Factor by which a schedule may beat its bound, which assumes that all prompts have the average length."""
ALIKE = 1.02
"""A point is still simulated if its bound is lower than the present point's bound by at most this factor.

This holds for points with the same share of the KV cache on the accelerator, whose schedules miss their bounds by about
as much as the present one does.
"""


class Climb:
    """A local search for better batch sizes of one policy: from a simulated schedule to a faster, similar one.

    Neighbouring sizes are simulated if the upper bound of their throughput is high enough. Once a bound has proved
    wrong, all neighbours are simulated. A bound is wrong if the simulated schedule is over `NEAR` times as fast as the
    bound, or has room for more micro-batches than the bound assumes. The reason may be that the policy places weights
    where memory is free, or fetches only chosen experts.

    Args:
        ladder: allowed sizes of micro-batches, in requests and ascending order.
        option_of: a function from the requests of a micro-batch and the tokens of a prefill chunk to the costs of such
            micro-batches.
    """

    def __init__(
        self,
        setting: Setting,
        traits: Traits,
        schedules: Schedules,
        ladder: Sequence[int],
        option_of: Callable[[int, int | None], SizeOption],
    ) -> None:
        self._setting = setting
        self._traits = traits
        self._schedules = schedules
        self._ladder = ladder
        self._option_of = option_of
        self._refuted = False

    def start(self, point: SchedulePoint) -> Schedule:
        """Simulate the schedule of the sizes in `point`; if not even one micro-batch fits, try smaller ones.

        The sizes may not fit, since they were found for prompts of average length.

        Raises:
            BadInput: not even a micro-batch of one request fits.
        """
        requests, share = point.size * point.micro_batches, point.resident / point.micro_batches
        sizes = [point.size, *(size for size in reversed(self._ladder) if size < point.size)]
        for size in sizes:
            count = -(-requests // size)
            with suppress(BadInput):
                return self._simulated(
                    point._replace(size=size, micro_batches=count, resident=resident_of(share, count))
                )
        return self._simulated(point)

    def climb_from(self, found: Schedule) -> Schedule:
        """Move from a schedule to faster ones, in large steps first, then in small steps; return the fastest one."""
        for around in (self._far, self._near):
            found = self._uphill(found, around)
        return found

    def _simulated(self, point: SchedulePoint) -> Schedule:
        schedule = self._schedules.at(point)
        bound = self._bound(schedule.point)
        if (
            bound is None
            or bound.micro_batches < schedule.point.micro_batches
            or schedule.throughput > NEAR * bound.throughput
        ):
            self._refuted = True
        return schedule

    def _uphill(self, found: Schedule, around: Callable[[Schedule], list[SchedulePoint]]) -> Schedule:
        """Move to faster schedules until no promising neighbour is left, or `MOST_PREVIEWS` neighbours were simulated.

        Args:
            around: a function that returns the sizes near those of a schedule.

        Returns:
            The fastest schedule.
        """
        tried = {found.point}
        ahead = self._ahead(found, around(found))
        while ahead and len(tried) <= MOST_PREVIEWS:
            point = ahead.pop(0)
            if point in tried:
                continue
            tried.add(point)
            with suppress(BadInput):
                other = self._simulated(point)
                if other.rate > found.rate:
                    found = other
                    ahead = self._ahead(found, around(found))
        return found

    def _ahead(self, found: Schedule, points: Sequence[SchedulePoint]) -> list[SchedulePoint]:
        """Return the `points` that may beat `found`, highest bound first; once a bound was wrong, all, unsorted."""
        bounds = {point: self._bound(point) for point in points}
        here = self._bound(found.point)
        bound = found.throughput if here is None else here.throughput

        def promise(point: SchedulePoint) -> float:
            choice = bounds[point]
            return 0.0 if choice is None else choice.throughput

        def may_be_better(point: SchedulePoint) -> bool:
            alike = point.resident == resident_of(self._share(found), point.micro_batches)
            return promise(point) >= (bound / ALIKE if alike else found.throughput / NEAR)

        if self._refuted:
            return list(points)
        known = {
            point_of(choice): point for point in points if (choice := bounds[point]) and may_be_better(point)
        }
        return sorted(known, key=lambda point: promise(known[point]), reverse=True)

    def _far(self, schedule: Schedule) -> list[SchedulePoint]:
        """Return far neighbours: about twice or half the size of micro-batches, or twice or half their number.

        Another size of micro-batches keeps the number of requests. About twice the size is also tried with the same
        number of micro-batches, and so with more requests. Prompts in chunks leave room for more micro-batches, so
        twice the number of micro-batches is also tried with chunks.
        """
        size, count, _, chunk = schedule.point
        others = [min(self._ladder, key=lambda each: abs(each - aim)) for aim in (2 * size, size / 2)]
        points = self._of_sizes(schedule, [other for other in dict.fromkeys(others) if other != size])
        points += [with_count(schedule.point, 2 * count), with_count(schedule.point, max(1, count // 2))]
        points += [schedule.point._replace(size=other) for other in others[:1]]
        if (
            chunk is None
            and self._setting.prefill_chunk is None
            and size * max(self._setting.lengths) > CHUNK
        ):
            points.append(with_count(schedule.point, 2 * count)._replace(chunk=CHUNK))
        return points

    def _near(self, schedule: Schedule) -> list[SchedulePoint]:
        """Return near neighbours: other numbers and sizes of micro-batches, and other shares of the KV cache.

        The number of micro-batches changes by a fifth. If their size changes, the number of requests stays the same.
        The KV cache of a tenth of the micro-batches moves to or from the accelerator; if there is only one micro-batch,
        the KV cache of a tenth of the layers does. The last neighbour adds a tenth to the number of micro-batches, and
        keeps the KV cache of the added ones on the accelerator, in case the host's memory is full.
        """
        point, share = schedule.point, self._share(schedule)
        size, count = point.size, point.micro_batches
        points = [with_count(point, -(-count * 6 // 5)), with_count(point, max(1, count * 5 // 6))]
        points += self._of_sizes(schedule, self._neighbours(size))
        if self._setting.searches_shares:
            parts = self._setting.layout.config.layers if count == 1 else count
            here, few = round(share * parts), -(-parts // 10)
            points += [
                point._replace(resident=resident_of(other / parts, count))
                for other in (max(0, here - few), min(parts, here + few))
            ]
            if count > 1:
                points.append(point._replace(micro_batches=count + few, resident=here + few))
        return points

    def _of_sizes(self, schedule: Schedule, sizes: Sequence[int]) -> list[SchedulePoint]:
        """Return points with these sizes of micro-batches, but the schedule's number of requests and cache share."""
        counts = [(size, -(-schedule.batch_size // size)) for size in sizes]
        share = self._share(schedule)
        return [
            SchedulePoint(size, count, resident_of(share, count), schedule.chunk) for size, count in counts
        ]

    def _share(self, schedule: Schedule) -> float:
        return schedule.point.resident / schedule.point.micro_batches

    def _bound(self, point: SchedulePoint) -> PolicyChoice | None:
        """Return a bound on the throughput of the sizes in `point`, with as many weights on the accelerator as fit.

        If not all micro-batches fit, the bound is for as many as fit; None if not even one fits.
        """
        option = self._option_of(point.size, point.chunk)

        def with_micro_batches(count: int) -> PolicyChoice | None:
            return filled(self._setting, self._traits, option, count, min(point.resident, count))

        counts = range(1, min(point.micro_batches, option.most) + 1)
        most = bisect_left(counts, True, key=lambda count: with_micro_batches(count) is None)
        return with_micro_batches(most) if most else None

    def _neighbours(self, size: int) -> list[int]:
        place = self._ladder.index(size)
        return [*self._ladder[place + 1 : place + 3], *self._ladder[max(0, place - 2) : place]]


def point_of(choice: PolicyChoice) -> SchedulePoint:
    """Convert a solution of the search, `choice`, to the sizes of a schedule to simulate."""
    return SchedulePoint(choice.micro_batch_size, choice.micro_batches, choice.resident, choice.chunk)
