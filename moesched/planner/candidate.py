"""One policy with one setting: its bound, and the best of its schedules that were simulated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.planner.search import PolicyChoice, best, costed, filled, least
from moesched.planner.traits import Setting, Shape, TraitProbe, Traits, learn, resident_bytes
from moesched.planner.trial_run import TrialRun, trial_run
from moesched.planner.uncertainty import Figures, Uncertainty, uncertainty
from moesched.runs.outcome import bytes_of_all_ranks
from moesched.runs.ranks import Rank
from moesched.seams import Policy
from moesched.steps.plan import Plan

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FINER = (3, 5, 6, 7, 10, 12, 14, 20, 24, 28, 36, 40, 48, 56, 80, 96, 112, 160, 192, 224)
"""Requests of a micro-batch: all coarse sizes are tried, and the fine sizes next to the best coarse one."""
MOST_SHARES = 8
MOST_PREVIEWS = 8
NEAR = 1.1
"""Factor by which a schedule may beat its bound, which assumes that all prompts have the average length."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes for a policy, and the predicted figures of its schedule.

    Attributes:
        weights_on_gpu: share of the weights' bytes that stays in the accelerator's memory.
        kv_on_gpu: share of the micro-batches whose KV cache stays there.
        throughput: generated tokens per second, prefill included.
    """

    batch_size: int
    micro_batch_size: int
    weights_on_gpu: float
    kv_on_gpu: float
    peak_bytes: dict[str, int]
    trial_run: TrialRun
    throughput: float


class Point(NamedTuple):
    """Sizes to try: µ, the number of micro-batches, and the number of those with their KV cache on the accelerator."""

    size: int
    micro_batches: int
    resident: int


class Candidate:
    """A policy and its bound.

    Args:
        sizes: allowed sizes of micro-batches; None for any.

    Raises:
        BadInput: not even one request fits; the message names the memory and the missing bytes.
    """

    def __init__(self, name: str, setting: Setting, sizes: Sequence[int] | None = None) -> None:
        setting.plan(setting.batch(1, 1))
        self.name = name
        self.setting = setting
        self.traits: Traits = learn(setting)
        self._probes: dict[int, TraitProbe] = {}
        coarse = sizes or sorted({*SIZES, *_even_shares(len(setting.lengths))})
        self._ladder = sizes or sorted({*coarse, *FINER})
        shapes = self._shapes(setting, coarse)
        rough = best(setting, self.traits, shapes) or least(setting, self.traits, shapes[0])
        size = rough.micro_batch_size
        finer = [other for other in self._ladder if other in coarse or size / 2 < other < size * 2]
        self.choice = best(setting, self.traits, self._shapes(setting, finer), rough.throughput) or rough

    def look(self) -> Seen:
        """Find the best schedule near the choice; if the KV cache can be split, also near none and all of it.

        The bound ignores that lanes overlap less well where micro-batches differ.
        """
        found = self._climb(self.choice)
        if self.setting.splits_kv and self.setting.kv_on_gpu is None:
            for share in (0.0, 1.0):
                setting = replace(self.setting, kv_on_gpu=share)
                shapes = self._shapes(setting, list(self._probes))
                edge = best(setting, self.traits, shapes, above=found.throughput / NEAR)
                if edge is not None and _point(edge) != _point(self.choice):
                    found = max(found, self._climb(edge), key=lambda seen: seen.throughput)
        return found

    def _climb(self, start: PolicyChoice) -> Seen:
        """Move from one schedule to a better one, until no neighbour's bound is better."""
        tried = {_point(start)}
        found = self.see(*_point(start))
        ahead = self._around(found)
        while ahead and len(tried) < MOST_PREVIEWS:
            choice = ahead.pop(0)
            if _point(choice) in tried or choice.throughput * NEAR < found.throughput:
                continue
            tried.add(_point(choice))
            with suppress(BadInput):
                other = self.see(*_point(choice))
                if other.throughput > found.throughput:
                    found = other
                    ahead = self._around(found)
        return found

    def _around(self, seen: Seen) -> list[PolicyChoice]:
        """The sizes to try next, the highest bound first.

        A fifth more or fewer micro-batches, or others as many requests, each with the same share of the KV cache on the
        accelerator; and a tenth of the micro-batches more or fewer there.
        """
        size, requests = seen.micro_batch_size, seen.batch_size
        count = -(-requests // size)
        sizes = [(size, -(-count * 6 // 5)), (size, max(1, count * 5 // 6))]
        sizes += [(other, -(-requests // other)) for other in self._neighbours(size)]
        share = seen.kv_on_gpu if self.setting.splits_kv else 0.0
        points = [Point(size, count, round(share * count)) for size, count in sizes]
        if self.setting.splits_kv and self.setting.kv_on_gpu is None:
            here, few = round(share * count), -(-count // 10)
            points += [Point(size, count, max(0, here - few)), Point(size, count, min(count, here + few))]
        choices = [choice for point in points if (choice := self._filled(point))]
        return sorted(choices, key=lambda choice: choice.throughput, reverse=True)

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
        """The bound on another machine, in tokens per second."""
        traits = self.traits if setting.machine is self.setting.machine else learn(setting)
        size = self.choice.micro_batch_size
        shape, *others = self._shapes(setting, [size, *self._neighbours(size)])
        same = costed(setting, traits, shape, self.choice).throughput
        better = best(setting, traits, [shape, *others], above=same)
        return same if better is None else better.throughput

    def _shapes(self, setting: Setting, sizes: Sequence[int]) -> list[Shape]:
        return [self._probe(size).shape(setting.cost) for size in sizes if size <= len(setting.lengths)]

    def _probe(self, size: int) -> TraitProbe:
        if size not in self._probes:
            self._probes[size] = TraitProbe(self.setting, size)
        return self._probes[size]

    def _neighbours(self, size: int) -> list[int]:
        place = self._ladder.index(size)
        return [*self._ladder[place + 1 : place + 3], *self._ladder[max(0, place - 2) : place]]

    def see(self, size: int, micro_batches: int, resident: int = 0) -> Seen:
        """Simulate the schedule of that number of micro-batches, or of as many as fit.

        resident: micro-batches whose KV cache stays on the accelerator, for a policy that splits it.
        """
        plan, policy = self._fitting(size, micro_batches, resident)
        batch = plan.batch
        seen = trial_run(plan, policy)
        return Seen(
            micro_batch_size=size,
            batch_size=len(batch.prompts),
            weights_on_gpu=resident_bytes(plan) / sum(map(plan.slot_bytes, plan.layout.pages)),
            kv_on_gpu=plan.kv.on_gpu,
            peak_bytes={
                name: bytes_of_all_ranks(plan, memory, memory.peak) for name, memory in plan.memories.items()
            },
            trial_run=seen,
            throughput=seen.tokens_per_second(batch),
        )

    def uncertainty(self, seen: Seen) -> Uncertainty:
        """The band of a schedule that was simulated."""
        count = -(-seen.batch_size // seen.micro_batch_size)
        resident = round(seen.kv_on_gpu * count)
        run = seen.trial_run
        return uncertainty(
            lambda: [Rank(*self._fitting(seen.micro_batch_size, count, resident))],
            Figures(seen.throughput, run.step_seconds, run.prefill_seconds),
        )

    def _fitting(self, size: int, micro_batches: int, resident: int) -> tuple[Plan, Policy]:
        """The plan of that number of micro-batches, or of the most that fit: the search knows only average lengths."""
        share = resident / micro_batches if self.setting.splits_kv else None
        count, step = micro_batches, 1
        while True:
            try:
                return self.setting.plan(self.setting.batch(count, size), kv_on_gpu=share)
            except BadInput:
                if count == 1:
                    raise
            count, step = max(1, count - step), 2 * step


def _point(choice: PolicyChoice) -> Point:
    return Point(choice.micro_batch_size, choice.micro_batches, choice.resident)


def _even_shares(requests: int) -> set[int]:
    """Sizes of micro-batches that divide the requests evenly, if a few micro-batches hold all."""
    shares = {-(-requests // count) for count in range(1, MOST_SHARES + 1)}
    return {share for share in shares if share <= SIZES[-1]}
