"""Searches the sizes of one policy for a model, machine and workload: bounds throughput, then simulates schedules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.planner.chunks import CHUNK, chunks_to_try, with_room
from moesched.planner.climb import Climb, point_of
from moesched.planner.schedules import Schedule, SchedulePoint, Schedules, resident_of, with_chunk
from moesched.planner.search import PolicyChoice, best, filled, least, most_of
from moesched.planner.setting import Setting
from moesched.planner.traits import SizeOption, SizeProbe, TraitProbe

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FINER = (3, 5, 6, 7, 10, 12, 14, 20, 24, 28, 36, 40, 48, 56, 80, 96, 112, 160, 192, 224)
"""Requests of a micro-batch: all sizes in `SIZES` are tried, then those in `FINER` that are near the best one."""
ROUGH = (1, 16, 64, 256)
"""Requests of a micro-batch that are tried in the first look at a policy."""
MOST_CHUNKS = 2048
"""Largest number of prefill chunks of a batch for which a user gives sizes, and of a micro-batch in the search."""
FEW = 4
"""Number of micro-batches where the search starts with the largest micro-batches that fit."""
MOST_SHARES = 8
SIMILAR = 1.05
"""Bounds that differ by at most this factor do not tell which schedule is better."""
PROMISING = 1.2
"""The search also climbs from a start whose rate is lower than the best start's rate by at most this factor."""
MOST_CLIMBS = 2
FINALISTS = 3
"""Largest number of schedules of which all layers are simulated in the end."""
MOST_FINAL_TASKS = 40_000
CLOSE = 1.05
"""A schedule of a few layers is a finalist if its rate is lower than the best one by at most this factor."""


class Candidate:
    """A policy for one model, machine and workload, and the search for its best sizes and schedule.

    Args:
        name: name of the policy.
        setting: everything that a plan depends on, apart from the batch.
        sizes: allowed sizes of micro-batches, in requests; None for any.

    Attributes:
        choice: the size and number of micro-batches, prefill chunk and share of the KV cache with the highest bound on
            throughput: at first among the sizes in `ROUGH`, after `refine` among all allowed sizes.
        schedules: the policy's simulated schedules, of a few layers or of all.

    Raises:
        BadInput: not even one request fits; the message names the memory and the missing bytes.
    """

    def __init__(self, name: str, setting: Setting, sizes: Sequence[int] | None = None) -> None:
        setting = with_room(setting)
        self.name = name
        self.setting = setting
        self._trait_probe = TraitProbe(setting)
        self.traits = self._trait_probe.traits
        self.schedules = Schedules(setting)
        self._probes: dict[tuple[int, int | None], SizeProbe] = {}
        self._coarse = sizes or sorted({*SIZES, *_even_shares(len(setting.lengths))})
        ladder = sizes or sorted({*self._coarse, *FINER, *ROUGH})
        self._ladder = [size for size in ladder if size <= len(setting.lengths)]
        if setting.prefill_chunk is not None:
            most = max(1, MOST_CHUNKS * setting.prefill_chunk // max(setting.lengths))
            self._ladder = [size for size in self._ladder if size <= most] or self._ladder[:1]
        self._first = sizes or ROUGH
        self._climb = Climb(setting, self.traits, self.schedules, self._ladder, self._option)
        options = self._options(setting, self._first)
        self.choice = self._best_of(setting, options) or least(setting, self.traits, options[0])

    def refine(self) -> None:
        """Set `choice` to the sizes with the highest bound on throughput.

        Coarse micro-batch sizes are compared first, then finer sizes near the best of them.
        """
        for sizes in (self._coarse, self._ladder):
            size = self.choice.micro_batch_size
            near = [other for other in sizes if other in self._coarse or size / 2 < other < size * 2]
            options = self._options(self.setting, near)
            self.choice = self._best_of(self.setting, options) or self.choice

    def first_trial(self) -> Schedule:
        """Simulate the sizes in `choice`, and a few with large micro-batches; return the fastest schedule.

        `choice` has the highest bound on throughput, and bounds may be wrong about the order of two sizes.
        """
        return self._tried([point_of(self.choice), *self._large([FEW])])[0]

    def search(self) -> Schedule:
        """Find the best schedule: climb from several promising sizes, and simulate all layers of the best few."""
        self.refine()
        starts = self._tried([point_of(self.choice), *self._large([1, FEW]), *self._edges()])
        for start in starts[:MOST_CLIMBS]:
            if start.rate * PROMISING >= starts[0].rate:
                self._climb.climb_from(start)
        self._try_chunks(self.schedules.best_first[0])
        return self._best_in_all_layers()

    def in_chunks(self, found: Schedule) -> Schedule:
        """Simulate a schedule's sizes with prompts in chunks of the default size; return the faster schedule."""
        if found.chunk is None and CHUNK in chunks_to_try(self.setting, found.micro_batch_size):
            with suppress(BadInput):
                chunked = self.schedules.at(found.point._replace(chunk=CHUNK))
                if chunked.batch_size == found.batch_size and chunked.rate > found.rate:
                    return chunked
        return found

    def bound_with(self, setting: Setting) -> float:
        """Return the policy's bound on throughput in tokens per second, for another machine or workload (`setting`).

        Micro-batches have the size in `choice`; their number is the best one in the other setting.
        """
        traits = self.traits
        if setting.machine is not self.setting.machine:
            traits = replace(traits, fetch=self._trait_probe.fetch_seconds(setting.cost))
        option = self._probe(self.choice.micro_batch_size, self.choice.chunk).option(setting.cost)
        resident = self.choice.resident / self.choice.micro_batches
        shares = {0.0, resident, 1.0} if self.setting.searches_shares else {resident}
        return max(most_of(setting, traits, option, share) for share in shares)

    def _tried(self, points: Iterable[SchedulePoint]) -> list[Schedule]:
        """Simulate the sizes in `points` that fit; return their schedules, the one with the highest `rate` first.

        Raises:
            BadInput: none of the sizes fits.
        """
        found = []
        first, *others = dict.fromkeys(points)
        for point in others:
            with suppress(BadInput):
                found.append(self._climb.start(point))
        if not found:
            return [self._climb.start(first)]
        with suppress(BadInput):
            found.append(self._climb.start(first))
        return sorted(found, key=lambda schedule: schedule.rate, reverse=True)

    def _large(self, counts: Sequence[int]) -> Iterator[SchedulePoint]:
        """Yield sizes with the largest micro-batches that fit, one for each number of micro-batches in `counts`.

        Sizes with prompts in chunks follow if chunks let larger micro-batches fit.
        """
        if len(self.setting.lengths) == 1:
            return
        sizes, most = [size for size in self._coarse if size in self._ladder], 0
        for chunk in chunks_to_try(self.setting, sizes[-1]):
            if most == len(sizes):
                return
            fits_all = self._fits(sizes[-1], chunk)
            place = len(sizes) if fits_all else self._number_that_fit(sizes[:-1], chunk)
            if place > most:
                most = place
                share = self._share or 0.0
                yield from (
                    SchedulePoint(sizes[place - 1], count, resident_of(share, count), chunk)
                    for count in counts
                )

    @property
    def _share(self) -> float | None:
        """The setting's share of the KV cache on the accelerator, by default 0; None if the policy splits no cache."""
        return (self.setting.kv_on_gpu or 0.0) if self.setting.splits_kv else None

    def _number_that_fit(self, sizes: Sequence[int], chunk: int | None) -> int:
        return bisect_left(sizes, True, key=lambda size: not self._fits(size, chunk))

    def _fits(self, size: int, chunk: int | None) -> bool:
        """Test whether one micro-batch of `size` requests fits.

        Args:
            chunk: most prompt tokens that pass a layer together; None for whole prompts.
        """
        setting = with_chunk(self.setting, chunk)
        return setting.fits(setting.batch(1, size), self._share)

    def _edges(self) -> Iterator[SchedulePoint]:
        """Yield sizes at the edges of the search, which bounds may wrongly rank below other sizes.

        Lanes overlap less well if only some micro-batches have their KV cache on the accelerator; bounds ignore this.
        At most three points are yielded: the highest bound with the whole cache on the host, the highest bound with it
        on the accelerator, and one micro-batch whose cache is on the accelerator for as many layers as fit.
        """
        if not self.setting.searches_shares:
            return
        for share in (0.0, 1.0):
            setting = replace(self.setting, kv_on_gpu=share)
            edge = self._best_of(setting, self._options(setting, [size for size, _ in list(self._probes)]))
            if edge is not None:
                yield point_of(edge)
        partly = self._most_layers(self.choice.micro_batch_size, self.choice.chunk)
        if partly is not None:
            yield point_of(partly)

    def _try_chunks(self, found: Schedule) -> None:
        """Simulate a schedule's sizes with larger prefill chunks step by step, until fewer requests fit.

        Whole prompts are tried after the largest chunks.
        """
        if found.chunk is None or self.setting.prefill_chunk is not None:
            return
        longest = found.micro_batch_size * max(self.setting.lengths)
        larger = [
            found.chunk << power for power in range(1, longest.bit_length()) if found.chunk << power < longest
        ]
        for chunk in (*larger, None):
            with suppress(BadInput):
                if self.schedules.at(found.point._replace(chunk=chunk)).batch_size < found.batch_size:
                    return

    def _best_in_all_layers(self) -> Schedule:
        """Simulate all layers of the few schedules with the highest rates, and return the best.

        If this would take too long, return the best schedule of a few layers.
        """
        few = self.schedules.best_first
        finalists = [schedule for schedule in few[:FINALISTS] if schedule.rate * CLOSE >= few[0].rate]
        if sum(schedule.tasks_of_all_layers for schedule in finalists) > MOST_FINAL_TASKS:
            return few[0]
        return max(map(self.schedules.deepened, finalists), key=lambda schedule: schedule.rate)

    def _most_layers(self, size: int, chunk: int | None) -> PolicyChoice | None:
        """Choose the sizes for one micro-batch whose KV cache is on the accelerator for as many layers as fit.

        Return None if all layers fit, or none does.

        Args:
            size: requests of the micro-batch.
            chunk: most prompt tokens that pass a layer together; None for whole prompts.
        """
        layers = self.setting.layout.config.layers
        option = self._option(size, chunk)
        choices = (
            filled(self.setting, self.traits, option, 1, here / layers) for here in range(layers, 0, -1)
        )
        found = next((choice for choice in choices if choice is not None), None)
        return found if found is not None and found.resident < 1 else None

    def _options(self, setting: Setting, sizes: Sequence[int]) -> list[SizeOption]:
        return [
            self._probe(size, chunk).option(setting.cost)
            for size in dict.fromkeys(sizes)
            if size in self._ladder
            for chunk in chunks_to_try(self.setting, size)
        ]

    def _best_of(
        self, setting: Setting, options: Sequence[SizeOption], above: float = 0.0
    ) -> PolicyChoice | None:
        """Choose the sizes with the highest bound on throughput; of similar bounds, the largest micro-batches.

        Larger micro-batches make fewer tasks. Return None if no bound reaches `above` tokens per second.
        """
        found = best(setting, self.traits, options, above)
        if found is None:
            return None
        similar = max(above, found.throughput / SIMILAR)
        for option in sorted(options, key=lambda option: option.size, reverse=True):
            if option.size <= found.micro_batch_size:
                break
            choice = best(setting, self.traits, [option], similar)
            if choice is not None:
                return choice
        return found

    def _option(self, size: int, chunk: int | None) -> SizeOption:
        return self._probe(size, chunk).option(self.setting.cost)

    def _probe(self, size: int, chunk: int | None) -> SizeProbe:
        if (size, chunk) not in self._probes:
            setting = with_chunk(self.setting, chunk)
            self._probes[size, chunk] = SizeProbe(
                setting, size, few=self._trait_probe.few, joint=self.traits.joint
            )
        return self._probes[size, chunk]


def _even_shares(requests: int) -> set[int]:
    """Return sizes of micro-batches, in requests, that divide the requests evenly among a few micro-batches."""
    shares = {-(-requests // count) for count in range(1, MOST_SHARES + 1)}
    return {share for share in shares if share <= SIZES[-1]}
