"""Recorders: observers that keep the tasks that ran, all of them or those of the last steps.

Keeping a task is one list append, since a virtual driver ends hundreds of thousands of them in a second; everything
else is worked out when the recording is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from moesched.engine import Engine
from moesched.tasks import STATE_NAMES, Block, Collective, Join, Lane, PageTransfer, Task, link_class
from moesched.trace.recording import LaneName, MemorySample, Recording, Slice

if TYPE_CHECKING:
    from moesched.drivers.replay import Timeline


class HasPeak(Protocol):
    """A memory's ledger, as far as a trace needs it."""

    @property
    def peak(self) -> int:
        """The most bytes that were taken of it."""


class _Rank:
    """What a recorder knows of one rank: its lanes, its joins, what its policy awaited and how long it thought, its
    memories, and slots filled before the first task.
    """

    def __init__(self, engine: Engine, memories: Mapping[str, HasPeak]) -> None:
        self.lanes = engine.lanes
        self.joins: list[Join] = []
        self.awaits: list[tuple[int, int]] = []
        self.submit_delays: list[tuple[int, int]] = []
        self.memories = memories
        self.filled: set[Block] = set()
        engine.joined = self.joins
        engine.awaits = self.awaits
        engine.submit_delays = self.submit_delays


class _Watcher:
    """What all recorders share: the ranks that they watch.

    Attributes:
        origin: what the driver's clock said at time 0; nanoseconds.
    """

    def __init__(self) -> None:
        self.origin = 0
        self._ranks: list[_Rank] = []
        self._rank_of: dict[Lane, int] = {}

    def watch(self, engine: Engine, memories: Mapping[str, HasPeak] | None = None) -> None:
        """Record the next rank: its lanes, its joins, what its memories hold. Call it before the engine runs."""
        self._rank_of.update(dict.fromkeys(engine.lanes, len(self._ranks)))
        self._ranks.append(_Rank(engine, memories or {}))


class Recorder(_Watcher):
    """Keeps every task that ran.

    Have it `watch` every rank's engine, and give it to the driver as an observer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tasks: list[Task] = []
        self._append = self._tasks.append
        self._replayed: list[Callable[[], Iterable[Task]]] = []

    @property
    def ended(self) -> Callable[[Task], None]:
        """Told of each task that ran: the bare append of a list."""
        return self._append

    def replayed(self, timeline: Timeline) -> None:
        """Told of a replayed run, whose tasks are made only if somebody wants the recording."""
        self._replayed.append(timeline.tasks)

    def recording(self) -> Recording:
        """What ran so far."""
        tasks = [*self._tasks, *(task for replayed in self._replayed for task in replayed())]
        return _record(tasks, self._ranks, self.origin, trimmed=False)


class LastSteps(_Watcher):
    """Keeps the tasks of the last `steps` steps, for runs too long to keep whole; loading counts as a step.

    Used like a Recorder.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"a recorder of the last {steps} steps would keep nothing: ask for 1 or more")
        super().__init__()
        self._most = steps
        self._steps: dict[int, list[Task]] = {}
        self._first: int | None = None

    def ended(self, task: Task) -> None:
        """Told of each task that ran."""
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
        """What ran in the last steps."""
        tasks = [task for kept in self._steps.values() for task in kept]
        return _record(tasks, self._ranks, self.origin, trimmed=self._first is not None)

    def _trim(self) -> None:
        self._forget(self._steps.pop(min(self._steps)))
        self._first = min(self._steps)
        for number, rank in enumerate(self._ranks):
            # Steps are submitted one after another, so the earliest task that is kept is one of the first step's.
            ids = [task.id for task in self._steps[self._first] if self._rank_of.get(task.lane) == number]
            if ids:  # a join before all kept tasks stands for none of them
                del rank.joins[: bisect_left(rank.joins, min(ids), key=_by_id)]
                for noted in (rank.awaits, rank.submit_delays):
                    noted[:] = [each for each in noted if each[0] >= min(ids)]

    def _forget(self, tasks: Iterable[Task]) -> None:
        """Of a task that is not kept, only the slots that it filled are remembered."""
        for task in tasks:
            if isinstance(task, PageTransfer) and task.slots:
                self._ranks[self._rank_of[task.lane]].filled.update(task.slots)


def _record(tasks: Sequence[Task], ranks: Sequence[_Rank], origin: int, *, trimmed: bool) -> Recording:
    joins: list[Sequence[Join]] = [rank.joins for rank in ranks]
    replayed = [task for task in tasks if isinstance(task, Join)]
    if replayed:  # a replay, of which there is one rank, tells of joins as of all else
        joins = [replayed]
    tasks = sorted((task for task in tasks if not isinstance(task, Join)), key=_by_end)
    lanes = {lane: LaneName(rank, lane.name) for rank, each in enumerate(ranks) for lane in each.lanes}
    numbers = _numbers(tasks, lanes, joins)
    slices = _slices(tasks, lanes)
    _note_policies(slices, ranks, numbers)
    recording = Recording(
        list(lanes.values()),
        slices,
        [numbers[lanes[task.lane].rank].of(task.deps) for task in tasks],
        [],
        trimmed,
        sum(map(len, joins)),
        frozenset(name for lane, name in lanes.items() if lane.in_order),
        origin,
    )
    recording.memory = _memory(tasks, lanes, ranks, recording.start, recording.end)
    return recording


def _slices(tasks: Sequence[Task], lanes: Mapping[Lane, LaneName]) -> list[Slice]:
    labels: dict[tuple[str, int, int, int], str] = {}
    lines: dict[tuple[int, int], str] = {}
    slices = []
    for task in tasks:
        about = (task.verb, task.layer, task.micro_batch, task.expert)
        label = labels.get(about)
        if label is None:
            label = labels[about] = task.label
        place = (id(task.code), task.instruction)
        line = lines.get(place)
        if line is None:
            line = lines[place] = task.line
        cls = type(task)
        work = task.work
        slices.append(
            Slice(
                task.id,
                lanes[task.lane],
                label,
                task.verb,
                cls.__name__,
                work.kind,
                work.resource,
                task.step,
                task.layer,
                task.micro_batch,
                task.expert,
                task.start,
                max(task.end, task.start + 1),  # viewers lose the arrows of a slice without length
                work.flops,
                work.nbytes,
                len(task.pages) if isinstance(task, PageTransfer) else 0,
                task.ticket if isinstance(task, Collective) else -1,
                STATE_NAMES[task.state],
                line,
                link_class(task.key) if isinstance(task, PageTransfer) else 0,
                dispatch=task.start - task.taken if task.taken >= 0 and task.lane.domain is None else 0,
            )
        )
    return slices


class _Numbers:
    """The recorded tasks of one rank by their ids, as indices, with every join replaced by what it stands for."""

    def __init__(self) -> None:
        self._tasks: dict[int, int] = {}
        self._joins: dict[int, tuple[int, ...]] = {}

    def add(self, task: Task, index: int) -> None:
        self._tasks[task.id] = index

    def join(self, join: Join) -> None:
        """Joins come in program order, so that a join of joins comes after them."""
        self._joins[join.id] = self.of(join.deps)

    def of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Indices of the recorded tasks behind some ids, each once; without those of tasks that were not recorded."""
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
    """One for each rank."""
    numbers = [_Numbers() for _ in joins]
    for index, task in enumerate(tasks):
        numbers[lanes[task.lane].rank].add(task, index)
    for of_rank, its_joins in zip(numbers, joins, strict=True):
        for join in its_joins:
            of_rank.join(join)
    return numbers


def _note_policies(slices: Sequence[Slice], ranks: Sequence[_Rank], numbers: Sequence[_Numbers]) -> None:
    for rank, of_rank in zip(ranks, numbers, strict=False):  # a replay tells of one rank
        for task, submitted in rank.awaits:
            for index in of_rank.of((task,)):
                slices[index].awaited_at = submitted
        for task, nanoseconds in rank.submit_delays:
            for index in of_rank.of((task,)):
                slices[index].thought = nanoseconds


def _memory(
    tasks: Sequence[Task], lanes: Mapping[Lane, LaneName], ranks: Sequence[_Rank], start: int, end: int
) -> list[MemorySample]:
    """A sample of every memory at the start, whenever a transfer into an empty slot starts, and at the end."""
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


def _by_id(task: Task) -> int:
    return task.id


def _by_start(task: Task) -> int:
    return task.start


def _by_end(task: Task) -> int:
    return task.end
