"""Makes a recording from finished tasks and from the data that a recorder collected on each rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, itemgetter

from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.machines.cost_model import CostModel
from moesched.steps.memory import Memory, Pool, counts_of
from moesched.steps.pool_counts import Counted
from moesched.tasks import STATE_NAMES, Block, Collective, Decision, Join, Lane, PageTransfer, Task
from moesched.trace.descriptions import Descriptions, title_of
from moesched.trace.recording import (
    Cancelled,
    LaneName,
    MemorySample,
    PoolSample,
    Recording,
    Slice,
    WorkKey,
)
from moesched.work import Demand, Work

by_id = attrgetter("id")
"""The sort key for program order."""


class RankRecord:
    """Data of one rank that its engine and pools collect during the run, apart from the finished tasks.

    Attributes:
        awaits: pairs of an awaited task's id and the number of tasks that the policy had submitted by then.
        submit_delays: pairs of a task's id and its `Slice.submit_delay`, for tasks that have one.
        cancels: pairs of a cancelled task and the time.
        memories: the memories by name.
        filled: slots into which tasks brought pages before the recorder dropped these tasks.
        counts: for each pool, a list of (number of the next submitted task, the pool's counts).
    """

    def __init__(self, engine: Engine, memories: Mapping[str, Memory], pools: Iterable[Pool]) -> None:
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

    def trim(self, task: int, step: int) -> None:
        """Drop the data of all steps before `step`.

        Args:
            task: the id of that step's first task on this rank.
            step: the number of the first step to keep.
        """
        del self.joins[: bisect_left(self.joins, task, key=by_id)]  # they depend on no later task
        for pairs in (self.awaits, self.submit_delays):
            pairs[:] = [each for each in pairs if each[0] >= task]
        self.cancels[:] = [each for each in self.cancels if each[0].step >= step]
        for log in self.counts:  # the last counts before the step are those at its start
            del log[: max(0, bisect_right(log, task, key=itemgetter(0)) - 1)]

    def stop(self) -> None:
        """Make the engine of this rank collect no more data; the data so far are kept."""
        engine = self._engine
        engine.joined = engine.awaits = engine.submit_delays = engine.cancels = None


def record(tasks: Sequence[Task], ranks: Sequence[RankRecord], origin: int, *, trimmed: bool) -> Recording:
    """Make the recording of tasks that ran.

    Args:
        tasks: the finished tasks of all ranks, in any order.
        ranks: data of the ranks that ran the tasks.
        origin: the time on the driver's clock that is time 0 of the recording, in nanoseconds.
        trimmed: whether `tasks` lacks the earliest tasks of the run; becomes `Recording.trimmed`.
    """
    joins: list[Sequence[Join]] = [rank.joins for rank in ranks]
    replayed = [task for task in tasks if isinstance(task, Join)]
    if replayed:  # a replay has one rank, and its joins are among its tasks
        joins = [replayed]
    tasks = sorted((task for task in tasks if not isinstance(task, Join)), key=by_id)
    tasks.sort(key=attrgetter("end"))  # those that end together stay in program order
    lanes = {lane: LaneName(rank, lane.name) for rank, each in enumerate(ranks) for lane in each.lanes}
    numbers = _numbers(tasks, lanes, joins)
    descriptions = Descriptions()
    producers = [numbers[lanes[task.lane].rank].of(task.deps) for task in tasks]
    slices = [_slice(task, lanes[task.lane], descriptions) for task in tasks]
    _lengthen(slices, producers)
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
        launching=max(0, min(task.launched, task.end) - task.start),
        experts=dict(task.value) if isinstance(task, Decision) and isinstance(task.value, Mapping) else None,
    )


def _cancelled(
    ranks: Sequence[RankRecord], lanes: Mapping[Lane, LaneName], descriptions: Descriptions
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
    return sorted(cancelled, key=attrgetter("time"))


def costs_of(tasks: Iterable[Task], *, sharing: bool) -> dict[WorkKey, Demand]:
    """Return the time and resources that tasks need, by `WorkKey`.

    Tasks whose demand is unknown are left out, and so are tasks that only wait, such as for the next request.

    Args:
        sharing: whether demands keep `shares` and `slowed`, by which the virtual clock slows down concurrent tasks.
    """
    works = {id(task.work): task.work for task in tasks}
    return {
        _key(work): demand if sharing else demand._replace(shares=(), slowed=())
        for work in works.values()
        if (demand := work.demand) is not None and demand.seconds
    }


def predictions_of(tasks: Iterable[Task], cost: CostModel) -> dict[WorkKey, float]:
    """Return the predicted seconds that tasks take alone on the machine, by `WorkKey`; unknown costs are left out."""
    predictions = {}
    for work in {id(task.work): task.work for task in tasks}.values():
        with suppress(BadInput):
            predictions[_key(work)] = cost.work(work).seconds
    return predictions


def _key(work: Work) -> WorkKey:
    return WorkKey(work.kind, work.resource, work.flops, work.nbytes)


class _Numbers:
    """Indices of one rank's recorded tasks by task id; the id of a join (a task without work) gives several."""

    def __init__(self) -> None:
        self._tasks: dict[int, int] = {}
        self._joins: dict[int, tuple[int, ...]] = {}

    def add(self, task: Task, index: int) -> None:
        self._tasks[task.id] = index

    def join(self, join: Join) -> None:
        """Add a join (a task without work), in program order, so that a join that depends on other joins finds them."""
        self._joins[join.id] = self.of(join.deps)

    def of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the tasks with these ids, each once; a join stands for the tasks that it depends on."""
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
    """Return, for each rank, an object that finds indices in `tasks` by id.

    The id of a task gives the task's own index, the id of a join the indices of the tasks that the join depends on.

    Args:
        joins: the joins (tasks without work) of each rank, in program order.
    """
    numbers = [_Numbers() for _ in joins]
    for index, task in enumerate(tasks):
        numbers[lanes[task.lane].rank].add(task, index)
    for of_rank, its_joins in zip(numbers, joins, strict=True):
        for join in its_joins:
            of_rank.join(join)
    return numbers


def _note_policies(slices: Sequence[Slice], ranks: Sequence[RankRecord], numbers: Sequence[_Numbers]) -> None:
    for rank, of_rank in zip(ranks, numbers, strict=False):  # a replay has one rank
        for task, submitted in rank.awaits:
            for index in of_rank.of((task,)):
                slices[index].awaited_at = submitted
        for task, nanoseconds in rank.submit_delays:
            for index in of_rank.of((task,)):
                slices[index].submit_delay = nanoseconds


def _memory(
    tasks: Sequence[Task], lanes: Mapping[Lane, LaneName], ranks: Sequence[RankRecord], start: int, end: int
) -> list[MemorySample]:
    """Return samples of each memory's use: at the start, whenever a transfer into an empty slot starts, and at the end.

    Args:
        start, end: start and end of the recording, in nanoseconds.
    """
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
    for task in sorted(transfers, key=attrgetter("start")):
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


def _pools(recording: Recording, ranks: Sequence[RankRecord]) -> list[PoolSample]:
    """Return samples of the pools' counts: one for each change, and one at the end.

    A change is shown at the start of the task that was submitted next.
    """
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


def _lengthen(slices: Sequence[Slice], producers: Sequence[Sequence[int]]) -> None:
    """Make tasks of zero length one nanosecond long, and delay their successors that would then begin too early.

    Viewers draw no arrows at tasks without length. A task's successors are the next task of its lane, and the tasks
    that depend on it.

    Errors of the clock are not repaired, so that checks find them: a task that overlapped another one of its lane, or
    began before the end of a task that it depends on, still does.

    Args:
        slices: the tasks that ran on all lanes, in any order; changed in place.
        producers: for each task, the indices of the tasks that it depends on.
    """
    if all(each.start < each.end for each in slices):
        return
    ends = [each.end for each in slices]
    last: dict[LaneName, int] = {}
    for place in sorted(range(len(slices)), key=lambda place: _in_time(slices[place])):
        each = slices[place]
        before = [*producers[place], *([last[each.lane]] if each.lane in last else [])]
        each.start = max([each.start, *(slices[other].end for other in before if ends[other] <= each.start)])
        each.end = max(each.end, each.start + 1)
        last[each.lane] = place


def _in_time(each: Slice) -> tuple[int, int, int]:
    """Return a task's sort key: start, end and number, so that tasks with equal times stay in program order."""
    return each.start, each.end, each.id
