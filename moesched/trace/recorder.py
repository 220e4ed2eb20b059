"""Recorders: observers that keep all tasks that ran, or those of the last steps.

Keeping a task is a single list append, since the virtual driver finishes hundreds of thousands of tasks per second;
everything else is computed when the recording is requested.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.machines.demand import CostModel, Demand
from moesched.steps.memory import Pool, counts_of
from moesched.steps.pool_counts import Counted
from moesched.tasks import (
    STATE_NAMES,
    Block,
    Collective,
    Decision,
    Join,
    Lane,
    PageTransfer,
    Task,
    Work,
)
from moesched.trace.access_records import accesses_of, log_accesses, title_of
from moesched.trace.descriptions import Descriptions
from moesched.trace.instants import lengthen
from moesched.trace.recording import (
    Cancelled,
    LaneName,
    MemorySample,
    PoolSample,
    Recording,
    Slice,
    WorkKey,
)

if TYPE_CHECKING:
    from moesched.drivers.replay import Timeline


class HasPeak(Protocol):
    """The part of a memory's ledger that traces need."""

    @property
    def peak(self) -> int:
        """The most bytes that were reserved at a time."""


class _Rank:
    """Data of one rank: lanes, joins, awaited tasks, submit delays, cancelled tasks, memories, filled slots.

    Attributes:
        filled: slots that were filled by dropped tasks.
        counts: the log of each pool.
    """

    def __init__(self, engine: Engine, memories: Mapping[str, HasPeak], pools: Iterable[Pool]) -> None:
        self._engine = engine
        self.lanes = engine.lanes
        self.joins: list[Join] = []
        self.awaits: list[tuple[int, int]] = []
        self.submit_delays: list[tuple[int, int]] = []
        self.cancels: list[tuple[Task, int]] = []
        self.memories = memories
        self.filled: set[Block] = set()
        self.pools = list(pools)
        self.counts: list[list[tuple[int, Counted]]] = []
        for pool in self.pools:
            log = counts_of(pool).log = []
            self.counts.append(log)
        engine.joined = self.joins
        engine.awaits = self.awaits
        engine.submit_delays = self.submit_delays
        engine.cancels = self.cancels

    def stop(self) -> None:
        """Keep what is known, and have the engine note nothing more."""
        engine = self._engine
        engine.joined = engine.awaits = engine.submit_delays = engine.cancels = None


class _RankRecorder:
    """Base of recorders: keeps the data of the ranks that it watches.

    Attributes:
        origin: time of the driver's clock at time 0, in nanoseconds.
        sharing: whether concurrent tasks of a modelled run slow each other down.
        cost: predicts the works of a measured run; None to predict nothing.
    """

    def __init__(self) -> None:
        self.origin = 0
        self.sharing = False
        self.cost: CostModel | None = None
        self._ranks: list[_Rank] = []
        self._rank_of: dict[Lane, int] = {}

    def watch(
        self, engine: Engine, memories: Mapping[str, HasPeak] | None = None, pools: Iterable[Pool] = ()
    ) -> None:
        """Record the next rank, with its lanes, joins, memories and pools. Call it before the engine runs."""
        self._rank_of.update(dict.fromkeys(engine.lanes, len(self._ranks)))
        self._ranks.append(_Rank(engine, memories or {}, pools))

    def _recorded(self, tasks: Sequence[Task], *, trimmed: bool) -> Recording:
        recording = _record(tasks, self._ranks, self.origin, trimmed=trimmed)
        recording.costs = _costs(tasks, sharing=self.sharing)
        if self.cost is not None:
            recording.predictions = _predictions(tasks, self.cost)
        accesses = [
            accesses_of(number, pool) for number, rank in enumerate(self._ranks) for pool in rank.pools
        ]
        recording.accesses = [each for each in accesses if each is not None]
        return recording


class Recorder(_RankRecorder):
    """Keeps every task that ran.

    Call `watch` with the engine of every rank, and pass the recorder to the driver as an observer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tasks: list[Task] = []
        self._append = self._tasks.append
        self._replayed: list[Callable[[], Iterable[Task]]] = []

    @property
    def ended(self) -> Callable[[Task], None]:
        """The callback for finished tasks: the append method of a list."""
        return self._append

    def replayed(self, timeline: Timeline) -> None:
        """Add a replayed run; its tasks are created only when the recording is requested."""
        self._replayed.append(timeline.tasks)

    def watch(
        self, engine: Engine, memories: Mapping[str, HasPeak] | None = None, pools: Iterable[Pool] = ()
    ) -> None:
        pools = list(pools)
        super().watch(engine, memories, pools)
        for pool in pools:
            log_accesses(pool)

    def recording(self) -> Recording:
        """Return the recording of the tasks that ran so far."""
        tasks = [*self._tasks, *(task for replayed in self._replayed for task in replayed())]
        return self._recorded(tasks, trimmed=False)


class FirstSteps(Recorder):
    """Keeps the tasks of loading and of the first steps: all that a replay needs.

    It is used like `Recorder`.

    Args:
        steps: number of steps that are kept in any case, the prefill included.
        tasks: number of tasks at which the step that runs is the last one to be kept.
    """

    def __init__(self, steps: int, tasks: int = 0) -> None:
        super().__init__()
        self._fewest = steps
        self._most = tasks
        self._end: int | None = None
        """The first step that is not kept, once it is known."""
        self._stopped: set[int] = set()

    @property
    def ended(self) -> Callable[[Task], None]:
        """The callback for finished tasks."""
        return self._keep

    def replayed(self, timeline: Timeline) -> None:
        """Add the first steps of a replayed run."""
        self._replayed.append(lambda: self._first_of(timeline.tasks()))

    def _keep(self, task: Task) -> None:
        if self._end is None:
            self._append(task)
            if self._is_enough(len(self._tasks), task):
                self._end = task.step + 1
                self._tasks[:] = [each for each in self._tasks if each.step < self._end]
        elif task.step < self._end:
            self._append(task)
        elif (rank := self._rank_of[task.lane]) not in self._stopped:  # it has submitted all earlier steps
            self._stopped.add(rank)
            self._ranks[rank].stop()

    def _first_of(self, tasks: Iterable[Task]) -> Iterator[Task]:
        end = None
        for count, task in enumerate(tasks, 1):
            if end is not None and task.step >= end:
                return
            if end is None and self._is_enough(count, task):
                end = task.step + 1
            yield task

    def _is_enough(self, count: int, task: Task) -> bool:
        return count >= self._most and task.step + 1 >= self._fewest


class LastSteps(_RankRecorder):
    """Keeps the tasks of the last `steps` steps, for long runs; loading counts as a step.

    It is used like `Recorder`.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"a recorder of the last {steps} steps would keep nothing: ask for 1 or more")
        super().__init__()
        self._most = steps
        self._steps: dict[int, list[Task]] = {}
        self._first: int | None = None

    def ended(self, task: Task) -> None:
        """Keep a finished task."""
        tasks = self._steps.get(task.step)
        if tasks is not None:
            tasks.append(task)
        elif self._first is not None and task.step < self._first:
            self._forget([task])
        else:
            self._steps[task.step] = [task]
            if len(self._steps) > self._most:
                self._trim()

    def recording(self) -> Recording:
        """Return the recording of the last steps."""
        tasks = [task for kept in self._steps.values() for task in kept]
        return self._recorded(tasks, trimmed=self._first is not None)

    def _trim(self) -> None:
        self._forget(self._steps.pop(min(self._steps)))
        self._first = min(self._steps)
        for number, rank in enumerate(self._ranks):
            # Steps are submitted one after another, so the earliest kept task belongs to the first kept step.
            ids = [task.id for task in self._steps[self._first] if self._rank_of.get(task.lane) == number]
            if ids:  # joins before all kept tasks depend on none of them
                del rank.joins[: bisect_left(rank.joins, min(ids), key=_by_id)]
                for pairs in (rank.awaits, rank.submit_delays):
                    pairs[:] = [each for each in pairs if each[0] >= min(ids)]
                rank.cancels[:] = [each for each in rank.cancels if each[0].step >= self._first]

    def _forget(self, tasks: Iterable[Task]) -> None:
        """Drop tasks, remembering only the slots that they filled."""
        for task in tasks:
            if isinstance(task, PageTransfer) and task.slots:
                self._ranks[self._rank_of[task.lane]].filled.update(task.slots)


def _record(tasks: Sequence[Task], ranks: Sequence[_Rank], origin: int, *, trimmed: bool) -> Recording:
    joins: list[Sequence[Join]] = [rank.joins for rank in ranks]
    replayed = [task for task in tasks if isinstance(task, Join)]
    if replayed:  # a replay has one rank, and its joins are among its tasks
        joins = [replayed]
    tasks = sorted((task for task in tasks if not isinstance(task, Join)), key=_by_id)
    tasks.sort(key=_by_end)  # those that end together stay in program order
    lanes = {lane: LaneName(rank, lane.name) for rank, each in enumerate(ranks) for lane in each.lanes}
    numbers = _numbers(tasks, lanes, joins)
    descriptions = Descriptions()
    producers = [numbers[lanes[task.lane].rank].of(task.deps) for task in tasks]
    slices = [_slice(task, lanes[task.lane], descriptions) for task in tasks]
    lengthen(slices, producers)
    _note_policies(slices, ranks, numbers)
    recording = Recording(
        list(lanes.values()),
        slices,
        producers,
        [],
        trimmed,
        sum(map(len, joins)),
        frozenset(name for lane, name in lanes.items() if lane.in_order),
        origin,
        cancelled=_cancelled(ranks, lanes, descriptions),
    )
    recording.memory = _memory(tasks, lanes, ranks, recording.start, recording.end)
    recording.pools = _pools(recording, ranks)
    return recording


def _slice(task: Task, lane: LaneName, descriptions: Descriptions) -> Slice:
    return Slice(
        task.id,
        lane,
        descriptions.of(task),
        task.step,
        task.start,
        task.end,
        STATE_NAMES[task.state],
        task.ticket if isinstance(task, Collective) else -1,
        descriptions.line_of(task),
        dispatch=task.start - task.taken if task.taken >= 0 and task.lane.domain is None else 0,
        experts=dict(task.value) if isinstance(task, Decision) and isinstance(task.value, Mapping) else None,
    )


def _cancelled(
    ranks: Sequence[_Rank], lanes: Mapping[Lane, LaneName], descriptions: Descriptions
) -> list[Cancelled]:
    cancelled = [
        Cancelled(
            task.id,
            lanes[task.lane],
            descriptions.of(task),
            task.step,
            time,
            descriptions.line_of(task),
        )
        for rank in ranks
        for task, time in rank.cancels
    ]
    return sorted(cancelled, key=lambda each: each.time)


def _costs(tasks: Iterable[Task], *, sharing: bool) -> dict[WorkKey, Demand]:
    """The demands of the works, where they were modelled."""
    works = {id(task.work): task.work for task in tasks if task.work.demand is not None}
    costs = {}
    for work in works.values():
        demand = work.demand if sharing else work.demand._replace(shares=(), slowed=())
        costs[_key(work)] = demand
    return costs


def _predictions(tasks: Iterable[Task], cost: CostModel) -> dict[WorkKey, float]:
    """The seconds of the works, alone; those without a cost are left out."""
    predictions = {}
    for work in {id(task.work): task.work for task in tasks}.values():
        with suppress(BadInput):
            predictions[_key(work)] = cost.work(work).seconds
    return predictions


def _key(work: Work) -> WorkKey:
    return WorkKey(work.kind, work.resource, work.flops, work.nbytes)


class _Numbers:
    """Indices of the recorded tasks of one rank by task id; a join maps to the tasks that it depends on."""

    def __init__(self) -> None:
        self._tasks: dict[int, int] = {}
        self._joins: dict[int, tuple[int, ...]] = {}

    def add(self, task: Task, index: int) -> None:
        self._tasks[task.id] = index

    def join(self, join: Join) -> None:
        """Add a join; joins are added in program order, so that a join of joins follows them."""
        self._joins[join.id] = self.of(join.deps)

    def of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the recorded tasks behind these ids, without duplicates and unrecorded tasks."""
        tasks = self._tasks
        try:
            return tuple(dict.fromkeys([tasks[each] for each in ids]))
        except KeyError:
            found: dict[int, None] = {}
            for each in ids:
                index = tasks.get(each)
                if index is not None:
                    found[index] = None
                else:
                    found.update(dict.fromkeys(self._joins.get(each, ())))
            return tuple(found)


def _numbers(
    tasks: Sequence[Task], lanes: Mapping[Lane, LaneName], joins: Sequence[Sequence[Join]]
) -> list[_Numbers]:
    """Number the tasks of each rank."""
    numbers = [_Numbers() for _ in joins]
    for index, task in enumerate(tasks):
        numbers[lanes[task.lane].rank].add(task, index)
    for of_rank, its_joins in zip(numbers, joins, strict=True):
        for join in its_joins:
            of_rank.join(join)
    return numbers


def _note_policies(slices: Sequence[Slice], ranks: Sequence[_Rank], numbers: Sequence[_Numbers]) -> None:
    for rank, of_rank in zip(ranks, numbers, strict=False):  # a replay has one rank
        for task, submitted in rank.awaits:
            for index in of_rank.of((task,)):
                slices[index].awaited_at = submitted
        for task, nanoseconds in rank.submit_delays:
            for index in of_rank.of((task,)):
                slices[index].submit_delay = nanoseconds


def _memory(
    tasks: Sequence[Task], lanes: Mapping[Lane, LaneName], ranks: Sequence[_Rank], start: int, end: int
) -> list[MemorySample]:
    """Sample every memory at the start, at the start of each transfer into an empty slot, and at the end."""
    filled = [set(rank.filled) for rank in ranks]
    held = [dict.fromkeys(rank.memories, 0) for rank in ranks]
    for totals, slots in zip(held, filled, strict=True):
        for slot in slots:
            totals[slot.memory] = totals.get(slot.memory, 0) + slot.nbytes
    samples = []

    def sample(rank: int, memory: str, time: int) -> None:
        ledger = ranks[rank].memories.get(memory)
        pages = held[rank].get(memory, 0)
        samples.append(MemorySample(rank, memory, time, pages if ledger is None else ledger.peak, pages))

    for rank, totals in enumerate(held):
        for memory in totals:
            sample(rank, memory, start)
    transfers = [task for task in tasks if isinstance(task, PageTransfer) and task.slots]
    for task in sorted(transfers, key=_by_start):
        rank = lanes[task.lane].rank
        fresh = [slot for slot in task.slots if slot not in filled[rank]]
        for slot in fresh:
            filled[rank].add(slot)
            held[rank][slot.memory] = held[rank].get(slot.memory, 0) + slot.nbytes
        for memory in dict.fromkeys(slot.memory for slot in fresh):
            sample(rank, memory, task.start)
    for rank, totals in enumerate(held):
        for memory in totals:
            sample(rank, memory, end)
    return samples


def _pools(recording: Recording, ranks: Sequence[_Rank]) -> list[PoolSample]:
    """Sample the pools' counts at the start of the task that was submitted next, and at the end."""
    samples = []
    for rank, each in enumerate(ranks):
        if not each.pools:
            continue
        starts = sorted((task.id, task.start) for task in recording.slices if task.lane.rank == rank)
        for pool, log in zip(each.pools, each.counts, strict=True):
            counts: dict[int, Counted] = {}
            time, last = recording.start, None
            for submitted, counted in log:
                if counted == last:
                    continue
                last = counted
                place = bisect_left(starts, (submitted, 0))
                # Tasks start in another order than they are submitted in; counts never fall.
                time = max(time, starts[place][1] if place < len(starts) else recording.end)
                counts[time] = counted
            if last is not None:
                counts[recording.end] = last
            title = title_of(pool)
            samples += [PoolSample(rank, title, time, counted) for time, counted in counts.items()]
    return samples


def _by_id(task: Task) -> int:
    return task.id


def _by_start(task: Task) -> int:
    return task.start


def _by_end(task: Task) -> int:
    return task.end
