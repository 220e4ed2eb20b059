"""One policy with one setting: its bound, and the best of its schedules that were simulated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.planner.climb import NEAR, Climb, point_of
from moesched.planner.schedules import Schedules, Seen
from moesched.planner.search import PolicyChoice, best, filled, least, most_of
from moesched.planner.setting import Setting
from moesched.planner.traits import Lesson, Shape, TraitProbe, Traits

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FINER = (3, 5, 6, 7, 10, 12, 14, 20, 24, 28, 36, 40, 48, 56, 80, 96, 112, 160, 192, 224)
"""Requests of a micro-batch: all coarse sizes are tried, and the fine sizes next to the best coarse one."""
ROUGH = (1, 16, 64, 256)
"""Sizes of the first look at a policy."""
MOST_SHARES = 8
SIMILAR = 1.05
"""Factor between bounds that do not tell which schedule is better."""


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
        ladder = sizes or sorted({*self._coarse, *FINER, *ROUGH})
        self._ladder = [size for size in ladder if size <= len(setting.lengths)]
        self._first = sizes or (self._coarse if deep else ROUGH)
        self._climb = Climb(setting, self.traits, self.schedules, self._ladder, self._shape)
        shapes = self._shapes(setting, self._first)
        self.choice = self._best_of(setting, shapes) or least(setting, self.traits, shapes[0])

    def refine(self) -> None:
        """Choose among all coarse sizes, and the fine ones next to the best of these."""
        for sizes in (self._ladder,) if self._first is self._coarse else (self._coarse, self._ladder):
            size = self.choice.micro_batch_size
            near = [other for other in sizes if other in self._coarse or size / 2 < other < size * 2]
            shapes = self._shapes(self.setting, near)
            self.choice = self._best_of(self.setting, shapes) or self.choice

    def first(self) -> Seen:
        """Simulate the schedule of the choice."""
        return self._climb.start(self.choice)

    def look(self) -> Seen:
        """Find the best schedule near the choice; if the KV cache can be split, also near none and all of it.

        The bound ignores that lanes overlap less well where micro-batches differ.
        """
        self.refine()
        found = self._climb.from_choice(self.choice)
        if self.setting.splits_kv and self.setting.kv_on_gpu is None:
            for share in (0.0, 1.0):
                setting = replace(self.setting, kv_on_gpu=share)
                shapes = self._shapes(setting, list(self._probes))
                edge = self._best_of(setting, shapes, above=found.throughput / NEAR)
                if edge is not None and point_of(edge) != point_of(self.choice):
                    found = max(found, self._climb.from_choice(edge), key=lambda seen: seen.rate)
            partly = self._most_layers(found.micro_batch_size)
            if partly is not None:
                with suppress(BadInput):  # the bound knows only about how much fits
                    found = max(found, self._climb.from_choice(partly), key=lambda seen: seen.rate)
        return found

    def _most_layers(self, size: int) -> PolicyChoice | None:
        """One micro-batch with the KV cache of as many layers as fit on the accelerator; None if all or none do."""
        layers = self.setting.layout.config.layers
        shape = self._shape(size)
        choices = (
            filled(self.setting, self.traits, shape, 1, here / layers) for here in range(layers, 0, -1)
        )
        found = next((choice for choice in choices if choice is not None), None)
        return found if found is not None and found.resident < 1 else None

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
        return [self._probe(size).shape(setting.cost) for size in sizes if size in self._ladder]

    def _best_of(self, setting: Setting, shapes: Sequence[Shape], above: float = 0.0) -> PolicyChoice | None:
        """The highest bound; of bounds that are about as high, one of larger micro-batches, which are fewer tasks."""
        found = best(setting, self.traits, shapes, above)
        if found is None:
            return None
        similar = max(above, found.throughput / SIMILAR)
        for shape in sorted(shapes, key=lambda shape: shape.size, reverse=True):
            if shape.size <= found.micro_batch_size:
                break
            choice = best(setting, self.traits, [shape], similar)
            if choice is not None:
                return choice
        return found

    def _shape(self, size: int) -> Shape:
        return self._probe(size).shape(self.setting.cost)

    def _probe(self, size: int) -> TraitProbe:
        if size not in self._probes:
            self._probes[size] = TraitProbe(self.setting, size, joint=self.traits.joint)
        return self._probes[size]


def _even_shares(requests: int) -> set[int]:
    """Sizes of micro-batches that divide the requests evenly, if a few micro-batches hold all."""
    shares = {-(-requests // count) for count in range(1, MOST_SHARES + 1)}
    return {share for share in shares if share <= SIZES[-1]}
