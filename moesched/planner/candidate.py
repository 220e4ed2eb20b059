"""One policy with one setting: its bound, and the best of its schedules that were simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.planner.schedules import Point, Schedules, Seen, resident_of
from moesched.planner.search import PolicyChoice, best, filled, least, most_of
from moesched.planner.setting import Setting
from moesched.planner.traits import Lesson, Shape, TraitProbe, Traits

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FINER = (3, 5, 6, 7, 10, 12, 14, 20, 24, 28, 36, 40, 48, 56, 80, 96, 112, 160, 192, 224)
"""Requests of a micro-batch: all coarse sizes are tried, and the fine sizes next to the best coarse one."""
ROUGH = (1, 4, 16, 48, 128, 256)
"""Sizes of the first look at a policy."""
MOST_SHARES = 8
MOST_PREVIEWS = 8
NEAR = 1.1
"""Factor by which a schedule may beat its bound, which assumes that all prompts have the average length."""


class Candidate:
    """A policy and its bound.

    Args:
        sizes: allowed sizes of micro-batches; None for any.
        deep: whether trial runs have all layers, not a few of them.

    Attributes:
        choice: the sizes with the highest bound: of coarse sizes, or of `ROUGH` ones for few layers, until refined.
        schedules: those of its schedules that were simulated.

    Raises:
        BadInput: not even one request fits; the message names the memory and the missing bytes.
    """

    def __init__(
        self, name: str, setting: Setting, sizes: Sequence[int] | None = None, *, deep: bool = True
    ) -> None:
        setting.plan(setting.batch(1, 1))
        self.name = name
        self.setting = setting
        self._lesson = Lesson(setting)
        self.traits: Traits = self._lesson.traits
        self.schedules = Schedules(setting, deep=deep)
        self._probes: dict[int, TraitProbe] = {}
        self._coarse = sizes or sorted({*SIZES, *_even_shares(len(setting.lengths))})
        self._ladder = sizes or sorted({*self._coarse, *FINER, *ROUGH})
        self._first = sizes or (self._coarse if deep else ROUGH)
        shapes = self._shapes(setting, self._first)
        self.choice = best(setting, self.traits, shapes) or least(setting, self.traits, shapes[0])

    def refine(self) -> None:
        """Choose among all coarse sizes, and the fine ones next to the best of these."""
        for sizes in (self._ladder,) if self._first is self._coarse else (self._coarse, self._ladder):
            size = self.choice.micro_batch_size
            near = [other for other in sizes if other in self._coarse or size / 2 < other < size * 2]
            shapes = self._shapes(self.setting, near)
            self.choice = best(self.setting, self.traits, shapes, self.choice.throughput) or self.choice

    def first(self) -> Seen:
        """Simulate the schedule of the choice."""
        return self._start(self.choice)

    def look(self) -> Seen:
        """Find the best schedule near the choice; if the KV cache can be split, also near none and all of it.

        The bound ignores that lanes overlap less well where micro-batches differ.
        """
        self.refine()
        found = self._climb(self.choice)
        if self.setting.splits_kv and self.setting.kv_on_gpu is None:
            for share in (0.0, 1.0):
                setting = replace(self.setting, kv_on_gpu=share)
                shapes = self._shapes(setting, list(self._probes))
                edge = best(setting, self.traits, shapes, above=found.throughput / NEAR)
                if edge is not None and _point(edge) != _point(self.choice):
                    found = max(found, self._climb(edge), key=lambda seen: seen.rate)
            partly = self._most_layers(found.micro_batch_size)
            if partly is not None:
                with suppress(BadInput):  # the bound knows only about how much fits
                    found = max(found, self._climb(partly), key=lambda seen: seen.rate)
        return found

    def _most_layers(self, size: int) -> PolicyChoice | None:
        """One micro-batch with the KV cache of as many layers as fit on the accelerator; None if all or none do."""
        layers = self.setting.layout.config.layers
        shape = self._probe(size).shape(self.setting.cost)
        choices = (
            filled(self.setting, self.traits, shape, 1, here / layers) for here in range(layers, 0, -1)
        )
        found = next((choice for choice in choices if choice is not None), None)
        return found if found is not None and found.resident < 1 else None

    def _climb(self, start: PolicyChoice) -> Seen:
        """Move from one schedule to a better one: in large steps first, then in small ones."""
        found = self._start(start)
        for around in (self._far, self._near):
            found = self._uphill(found, around)
        return found

    def _uphill(self, found: Seen, around: Callable[[Seen], list[Point]]) -> Seen:
        """Move on, until no neighbour's bound is better, or enough of them were tried."""
        tried: set[Point] = set()
        ahead = self._in_order(around(found))
        while ahead and len(tried) < MOST_PREVIEWS:
            choice = ahead.pop(0)
            if _point(choice) in tried or choice.throughput * NEAR < found.throughput:
                continue
            tried.add(_point(choice))
            with suppress(BadInput):
                other = self.schedules.see(*_point(choice))
                if other.rate > found.rate:
                    found = other
                    ahead = self._in_order(around(found))
        return found

    def _in_order(self, points: Sequence[Point]) -> list[PolicyChoice]:
        """What of these fits, the highest bound first."""
        choices = [choice for point in points if (choice := self._filled(point))]
        return sorted(choices, key=lambda choice: choice.throughput, reverse=True)

    def _start(self, choice: PolicyChoice) -> Seen:
        """Simulate a choice; with smaller micro-batches if not even one fits: the search knows only average lengths."""
        size, count, resident = _point(choice)
        smaller = [other for other in reversed(self._ladder) if other < size]
        for other in smaller:
            try:
                return self.schedules.see(size, count, resident)
            except BadInput:
                share = resident / count
                size, count = other, -(-choice.micro_batch_size * choice.micro_batches // other)
                resident = resident_of(share, count)
        return self.schedules.see(size, count, resident)

    def _far(self, seen: Seen) -> list[Point]:
        """Micro-batches of about twice and half the size, for as many requests."""
        size = seen.micro_batch_size
        others = {min(self._ladder, key=lambda each: abs(each - aim)) for aim in (2 * size, size / 2)}
        return self._of_sizes(seen, sorted(others - {size}))

    def _near(self, seen: Seen) -> list[Point]:
        """A fifth more or fewer micro-batches, or other sizes for as many requests; more or less of the KV cache there.

        The share of the KV cache on the accelerator changes by a tenth of the micro-batches, or of a single one's
        layers.
        """
        size, share = seen.micro_batch_size, self._share(seen)
        count = -(-seen.batch_size // size)
        points = [
            Point(size, other, resident_of(share, other))
            for other in (-(-count * 6 // 5), max(1, count * 5 // 6))
        ]
        points += self._of_sizes(seen, self._neighbours(size))
        if self.setting.splits_kv and self.setting.kv_on_gpu is None:
            parts = self.setting.layout.config.layers if count == 1 else count
            here, few = round(share * parts), -(-parts // 10)
            points += [
                Point(size, count, resident_of(other / parts, count))
                for other in (max(0, here - few), min(parts, here + few))
            ]
        return points

    def _of_sizes(self, seen: Seen, sizes: Sequence[int]) -> list[Point]:
        """Micro-batches of these sizes for as many requests, with the same share of the KV cache on the accelerator."""
        counts = [(size, -(-seen.batch_size // size)) for size in sizes]
        return [Point(size, count, resident_of(self._share(seen), count)) for size, count in counts]

    def _share(self, seen: Seen) -> float:
        return seen.kv_on_gpu if self.setting.splits_kv else 0.0

    def _filled(self, point: Point) -> PolicyChoice | None:
        """That number of micro-batches, or the most that should fit, with as many weights kept as then fit."""
        shape = self._probe(point.size).shape(self.setting.cost)
        count, step = min(point.micro_batches, shape.most), 1
        while count > 0:
            choice = filled(self.setting, self.traits, shape, count, min(point.resident, count))
            if choice is not None:
                return choice
            count, step = count - step, 2 * step
        return None

    def bound_with(self, setting: Setting) -> float:
        """The bound with micro-batches of the chosen size on another machine, in tokens per second."""
        faster = setting.machine is not self.setting.machine
        traits = (
            replace(self.traits, fetch=self._lesson.fetch_seconds(setting.cost)) if faster else self.traits
        )
        shape = self._probe(self.choice.micro_batch_size).shape(setting.cost)
        resident = self.choice.resident / self.choice.micro_batches
        shares = {0.0, resident, 1.0} if self.setting.splits_kv and setting.kv_on_gpu is None else {resident}
        return max(most_of(setting, traits, shape, share) for share in shares)

    def _shapes(self, setting: Setting, sizes: Sequence[int]) -> list[Shape]:
        return [self._probe(size).shape(setting.cost) for size in sizes if size <= len(setting.lengths)]

    def _probe(self, size: int) -> TraitProbe:
        if size not in self._probes:
            self._probes[size] = TraitProbe(self.setting, size, joint=self.traits.joint)
        return self._probes[size]

    def _neighbours(self, size: int) -> list[int]:
        place = self._ladder.index(size)
        return [*self._ladder[place + 1 : place + 3], *self._ladder[max(0, place - 2) : place]]


def _point(choice: PolicyChoice) -> Point:
    return Point(choice.micro_batch_size, choice.micro_batches, choice.resident)


def _even_shares(requests: int) -> set[int]:
    """Sizes of micro-batches that divide the requests evenly, if a few micro-batches hold all."""
    shares = {-(-requests // count) for count in range(1, MOST_SHARES + 1)}
    return {share for share in shares if share <= SIZES[-1]}
