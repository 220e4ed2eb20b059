"""One policy in one setting: the most that it could reach, and the best of its schedules that were looked at."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from moesched.errors import BadInput
from moesched.plan import Plan
from moesched.preview import Preview, preview
from moesched.seams import Policy

from .search import Choice, best, least
from .traits import Probe, Setting, Traits, kept_bytes, learn

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FINER = (3, 5, 6, 7, 10, 12, 14, 20, 24, 28, 36, 40, 48, 56, 80, 96, 112, 160, 192, 224)
"""Requests of a micro-batch: all of the first are tried, of the second those that lie around the best of the first."""
MOST_SHARES = 8
MOST_PREVIEWS = 8


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes for a policy, and what its schedule comes to with them.

    Attributes:
        weights_on_gpu: the share of the weights' bytes that stays in the accelerator's memory.
        throughput: generated tokens per second, prefill included.
    """

    batch_size: int
    micro_batch_size: int
    weights_on_gpu: float
    peak_bytes: dict[str, int]
    preview: Preview
    throughput: float


class Candidate:
    """A policy and its bound.

    Args:
        sizes: of micro-batches, where not any will do.

    Raises:
        BadInput: not even one request fits; the message says by how many bytes, of what.
    """

    def __init__(self, name: str, setting: Setting, sizes: Sequence[int] | None = None) -> None:
        setting.plan(setting.batch(1, 1))
        self.name = name
        self.setting = setting
        self.traits: Traits = learn(setting)
        self._probes: dict[int, Probe] = {}
        coarse = sizes or sorted({*SIZES, *_even_shares(len(setting.lengths))})
        self._ladder = sizes or sorted({*coarse, *FINER})
        size = self._search(setting, self.traits, coarse).micro_batch_size
        finer = [other for other in self._ladder if other in coarse or size / 2 < other < size * 2]
        self.choice = self._search(setting, self.traits, finer)

    def look(self) -> Seen:
        """The best schedule around the choice: from one to a better one, until no neighbour is better."""
        found = self.see(self.choice.micro_batch_size, self.choice.micro_batches)
        tried = {(found.micro_batch_size, self.choice.micro_batches)}
        ahead = self._around(found)
        while ahead and len(tried) < MOST_PREVIEWS:
            sizes = ahead.pop(0)
            if sizes in tried:
                continue
            tried.add(sizes)
            with suppress(BadInput):
                other = self.see(*sizes)
                if other.throughput > found.throughput:
                    found = other
                    ahead = self._around(found)
        return found

    def _around(self, seen: Seen) -> list[tuple[int, int]]:
        """Sizes and numbers of micro-batches to try next: a fifth more or fewer of them, or others as many requests."""
        size, requests = seen.micro_batch_size, seen.batch_size
        count = -(-requests // size)
        more_or_fewer = [(size, -(-count * 6 // 5)), (size, max(1, count * 5 // 6))]
        return [*more_or_fewer, *((other, -(-requests // other)) for other in self._neighbours(size))]

    def bound_with(self, setting: Setting) -> float:
        """The bound if the machine were another one, in tokens per second."""
        traits = self.traits if setting.machine is self.setting.machine else learn(setting)
        sizes = [self.choice.micro_batch_size, *self._neighbours(self.choice.micro_batch_size)]
        return self._search(setting, traits, sizes).throughput

    def _search(self, setting: Setting, traits: Traits, sizes: Sequence[int]) -> Choice:
        shapes = [self._probe(size).shape(setting.cost) for size in sizes if size <= len(setting.lengths)]
        return best(setting, traits, shapes) or least(setting, traits, shapes[0])

    def _probe(self, size: int) -> Probe:
        if size not in self._probes:
            self._probes[size] = Probe(self.setting, size)
        return self._probes[size]

    def _neighbours(self, size: int) -> list[int]:
        place = self._ladder.index(size)
        return [*self._ladder[place + 1 : place + 3], *self._ladder[max(0, place - 2) : place]]

    def see(self, size: int, micro_batches: int) -> Seen:
        """Look at the schedule of that many micro-batches, or of as many as fit."""
        plan, policy = self._fitting(size, micro_batches)
        batch = plan.batch
        seen = preview(plan, policy)
        return Seen(
            micro_batch_size=size,
            batch_size=len(batch.prompts),
            weights_on_gpu=kept_bytes(plan) / sum(map(plan.slot_bytes, plan.layout.pages)),
            peak_bytes={name: plan.in_all(memory, memory.peak) for name, memory in plan.memories.items()},
            preview=seen,
            throughput=seen.tokens_per_second(batch),
        )

    def _fitting(self, size: int, micro_batches: int) -> tuple[Plan, Policy]:
        """The plan of that many micro-batches, or of the most that fit: the search knows average lengths only."""
        count, step = micro_batches, 1
        while True:
            try:
                return self.setting.plan(self.setting.batch(count, size))
            except BadInput:
                if count == 1:
                    raise
            count, step = max(1, count - step), 2 * step


def _even_shares(requests: int) -> set[int]:
    """Sizes of micro-batches that share out so many requests evenly, where a few of them hold all."""
    shares = {-(-requests // count) for count in range(1, MOST_SHARES + 1)}
    return {share for share in shares if share <= SIZES[-1]}
