"""Replay: computes the times of a run's tasks from captured steps, which are task graphs (see `capture.py`).

Each step has durations of its own. The times are computed in arrays of integers. They equal those of the virtual driver
to the nanosecond, and take less time to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, islice, pairwise
from operator import sub
from typing import Protocol, runtime_checkable

import msgspec

from moesched.drivers.capture import Price, Sized, StepGraph, capture
from moesched.drivers.in_order import play_in_order
from moesched.drivers.pricing import nanoseconds, no_garbage_collection
from moesched.machines.cost_model import CostModel
from moesched.seams import Policy
from moesched.steps.run_state import RunState
from moesched.tasks import CLASS_SHIFT, DONE, Lane, Task
from moesched.work import Work

_NUMBER = (1 << CLASS_SHIFT) - 1
"""Mask of the bits of a key that are the task's number."""


class ReplayedRun:
    """A replayed run: start and end of every task, in nanoseconds; tasks are numbered in order of submission.

    Attributes:
        steps: for each step of the run, the captured step that it repeats; the first step is loading.
        works: for each step, the `Work` objects (FLOPs and bytes) that differ between steps, by (micro-batch, verb,
            kind of layer).
        starts, ends: for each task, by its number, the time at which it starts and ends.
    """

    def __init__(
        self,
        steps: list[StepGraph],
        works: list[dict[Sized, Work]],
        starts: list[int],
        ends: list[int],
    ) -> None:
        self.steps = steps
        self.works = works
        self.starts = starts
        self.ends = ends

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def count(self) -> int:
        """Number of tasks of the whole run, without joins (tasks that only link tasks to others)."""
        return sum(map(len, (positions for step in self.steps for positions in step.by_lane)))

    def step_ends(self) -> list[int]:
        """Return the nanoseconds at which each step ended.

        Loading ends with the last of its tasks, each other step with the last of its `sample` tasks.
        """
        return [
            max((self.ends[base + position] for position in step.final), default=0)
            for base, step in zip(self.bases, self.steps, strict=False)
        ]

    @cached_property
    def bases(self) -> list[int]:
        """The number (from 0) of each step's first task; one more entry at the end counts all tasks."""
        return [0, *accumulate(len(step.tasks) for step in self.steps)]

    @property
    def captured(self) -> int:
        """Number of steps that the policy scheduled, without loading; each other step repeats the one before it."""
        return len({id(step) for step in self.steps}) - 1

    def samples(self, index: int) -> dict[int, int]:
        """Return the nanoseconds at which each micro-batch had sampled its tokens in a step, by micro-batch.

        index: the step's index; 0 for loading.
        """
        step, base = self.steps[index], self.bases[index]
        return {step.tasks[place].micro_batch: self.ends[base + place] for place in step.samples}

    def busy(self, lanes: Sequence[Lane]) -> dict[str, int]:
        """Return the nanoseconds that each lane was busy after loading, by the lane's name."""
        busy = [0] * len(lanes)
        for (start, stop), step in islice(zip(pairwise(self.bases), self.steps, strict=True), 1, None):
            took = list(map(sub, self.ends[start:stop], self.starts[start:stop]))
            for lane, positions in enumerate(step.by_lane):
                busy[lane] += sum(map(took.__getitem__, positions))
        return {lane.name: nanoseconds for lane, nanoseconds in zip(lanes, busy, strict=True)}

    def awaits(self) -> list[tuple[int, int]]:
        """Return the tasks whose ends the run awaits before it submits a step.

        The result has pairs (the awaited task's number, number of tasks that are submitted before the wait).
        """
        awaits = []
        bases = self.bases
        for index in range(1, len(self.steps)):
            before = max(0, index - 2)
            step = self.steps[before]
            if before or index == 1:
                awaits += [(bases[before] + position, bases[index]) for position in step.final]
        return awaits

    def tasks(self) -> Iterator[Task]:
        """Yield all tasks in program order, joins included, as they would be at the end of a run in a driver."""
        number = 0
        for index, graph in enumerate(self.steps):
            shift = number - graph.first
            for captured in graph.tasks:
                yield msgspec.structs.replace(
                    captured,
                    work=_resized(captured.work, self.works[index].get(graph.key(captured))),
                    id=number,
                    step=index - 1,
                    generated=_generated(captured, index - 1),
                    state=DONE,
                    start=self.starts[number],
                    end=self.ends[number],
                    deps=[each + shift for each in captured.deps],
                    followers=None,
                )
                number += 1


def _generated(captured: Task, step: int) -> int:
    """Return how many tokens each sequence has generated before the task of `step` that repeats the task `captured`."""
    since = step - captured.step
    return captured.generated + since if captured.phase == "decode" else captured.generated


def _resized(captured: Work, work: Work | None) -> Work:
    """Return a captured task's `Work` (FLOPs and bytes) in another step; its processor stays the same.

    Args:
        captured: the `Work` of the captured task.
        work: the other step's `Work` for the same micro-batch, verb and kind of layer; it may name another processor.
            None if the task's `Work` is the same in all steps.
    """
    if work is None or work.resource == captured.resource:
        return work or captured
    return msgspec.structs.replace(work, kind=captured.kind, resource=captured.resource)


@runtime_checkable
class ReplayObserver(Protocol):
    """An observer that is given a whole replayed run at once, since making objects of all tasks would take longer."""

    def replayed(self, run: ReplayedRun) -> None:
        """Observe a whole run; called once per run, instead of `ended` once per task."""


def replay_run(run_state: RunState, policy: Policy, cost: CostModel) -> ReplayedRun:
    """Capture a run, and replay it with durations from `cost`.

    Raises:
        NotFixed: the policy's steps may differ, or the policy failed.
    """
    with no_garbage_collection():
        return _play(capture(run_state, policy), run_state, lambda work: nanoseconds(work, cost))


class CapturedRun:
    """A run that is captured once, and can be replayed with several cost models.

    Raises:
        NotFixed: the graphs of the policy's steps may differ from each other, or the policy failed.
    """

    def __init__(self, run_state: RunState, policy: Policy) -> None:
        self._run_state = run_state
        with no_garbage_collection():
            self._steps = capture(run_state, policy)

    def step_ends(self, cost: CostModel) -> list[int]:
        """Replay the run with a cost model; return the nanoseconds at which each step ended.

        The first time is the end of loading. Each other step ends with its last `sample`.
        """
        known: dict[int, int] = {}
        works: list[Work] = []  # kept, so that no other work gets one's id

        def price(work: Work) -> int:
            if id(work) not in known:
                known[id(work)] = max(1, round(cost.work(work).seconds * 1e9))
                works.append(work)
            return known[id(work)]

        for step in self._steps:
            step.forget_prices()
        with no_garbage_collection():
            return _play(self._steps, self._run_state, price).step_ends()


def _play(steps: list[StepGraph], run_state: RunState, price: Price) -> ReplayedRun:
    lanes = run_state.engine.lanes
    priced = _PricedSteps(steps, run_state, price)
    if all(lane.in_order for lane in lanes):
        starts, ends = play_in_order(steps, map(priced.durations, range(len(steps))))
    else:
        starts, ends = Player(steps, len(lanes), priced.durations).run()
    return ReplayedRun(steps, priced.works, starts, ends)


class _PricedSteps:
    """Computes the durations of captured steps, one step after the other.

    Attributes:
        works: for each step, the `Work` objects (FLOPs and bytes) that differ between steps, by (micro-batch, verb,
            kind of layer).
    """

    def __init__(self, steps: Sequence[StepGraph], run_state: RunState, price: Price) -> None:
        self.works: list[dict[Sized, Work]] = []
        self._steps = steps
        self._run_state = run_state
        self._price = price
        run_state.restart()

    def durations(self, index: int) -> list[int]:
        """Return the nanoseconds of each task of the step `index`, 0 for loading; must be called step after step."""
        step, run_state = self._steps[index], self._run_state
        if step.samples:
            run_state.begin_step()
            run_state.end_step()
        works = {key: run_state.micro_batch(key[0]).works_at[0][key[2]][key[1]] for key in step.sized}
        self.works.append(works)
        return step.nanoseconds(self._price, works)


class Player:
    """Computes the times of the tasks of captured steps; each lane takes its tasks by priority or in program order.

    As in `Generation`, step n is submitted once all micro-batches have sampled in step n - 2.

    Args:
        steps: the captured steps, from `capture`.
        lanes: number of lanes.
        durations: returns the nanoseconds of the tasks of a step, given its index.
    """

    def __init__(self, steps: Sequence[StepGraph], lanes: int, durations: Callable[[int], list[int]]) -> None:
        self._steps = steps
        self._durations = durations
        self._step_ended = False
        self._tasks = _PlayedTasks()
        self._lanes = _PlayedLanes(lanes)
        self._crossing: dict[int, list[int]] = {}
        self._ends_step: dict[int, int] = {}
        self._unsampled: list[int] = []
        self._joins: deque[int] = deque()
        self._arrived: list[int] = []

    def run(self) -> tuple[list[int], list[int]]:
        """Compute all steps; return the start and the end of every task, in nanoseconds."""
        tasks, lanes = self._tasks, self._lanes
        starts, ends, durations, waits = tasks.starts, tasks.ends, tasks.durations, tasks.waits
        later, lane_of, classes = tasks.later, tasks.lane_of, tasks.classes
        running, waiting, events = lanes.running, lanes.waiting, lanes.events
        crossing, joins, arrived = self._crossing, self._joins, self._arrived
        self._submit_ready(0)
        while events:
            now, lane = events[0]
            ended = number = running[lane]
            ends[ended] = now
            while True:
                for further in later[number]:
                    other = number + further
                    left = waits[other] - 1
                    waits[other] = left
                    if left:
                        continue
                    other_lane = lane_of[other]
                    if other_lane < -1:
                        arrived.append(other)
                    elif other_lane < 0:
                        starts[other] = ends[other] = now
                        joins.append(other)
                    elif running[other_lane] < 0:
                        running[other_lane] = other
                        starts[other] = now
                        heappush(events, (now + durations[other], other_lane))
                    else:
                        heappush(waiting[other_lane], classes[other] | other)
                if number in crossing:
                    self._cross(number, now)
                if not joins:
                    break
                number = joins.popleft()
            queue = waiting[lane]
            if queue:
                following = heappop(queue) & _NUMBER
                running[lane] = following
                starts[following] = now
                heapreplace(events, (now + durations[following], lane))
            else:
                running[lane] = -1
                heappop(events)
            if arrived:
                self._admit(now)
            if self._step_ended:
                self._submit_ready(now)
        return starts, ends

    def _cross(self, number: int, now: int) -> None:
        """Release, at time `now`, tasks of later steps that wait for task `number`; note if another step may begin."""
        tasks = self._tasks
        for other in self._crossing.pop(number):
            tasks.waits[other] -= 1
            if not tasks.waits[other]:
                if tasks.lane_of[other] < -1:
                    self._arrived.append(other)
                elif tasks.lane_of[other] < 0:
                    tasks.starts[other] = tasks.ends[other] = now
                    self._joins.append(other)
                else:
                    self._enqueue(other, now)
        index = self._ends_step.pop(number, -1)
        if index >= 0:
            self._unsampled[index] -= 1
            self._step_ended = not self._unsampled[index]

    def _admit(self, now: int) -> None:
        """Start collectives that wait for no task any more, at the time `now`; queue them if their lane is busy.

        In a lane's queue they come after earlier collectives and before all other tasks.
        """
        lanes = self._lanes
        for number in self._arrived:
            before = (lanes.admitted - _NUMBER) << CLASS_SHIFT
            lanes.take(-2 - self._tasks.lane_of[number], number, before, now, self._tasks)
            lanes.admitted += 1
        self._arrived.clear()

    def _enqueue(self, number: int, now: int) -> None:
        tasks = self._tasks
        self._lanes.take(tasks.lane_of[number], number, tasks.classes[number], now, tasks)

    def _submit_ready(self, now: int) -> None:
        """Submit the steps that may begin at the time `now`.

        Step n begins once step n - 2 has its tokens; prefill and the first decode step wait for loading only.
        """
        self._step_ended = False
        for index in range(len(self._unsampled), len(self._steps)):
            if index and self._unsampled[max(0, index - 2)]:
                return
            self._submit(index, now)

    def _submit(self, index: int, now: int) -> None:
        graph, tasks = self._steps[index], self._tasks
        base = len(tasks.starts)
        tasks.append(graph, self._durations(index))
        for position, back in graph.earlier:
            number = base + position
            if tasks.ends[number - back] < 0:
                tasks.waits[number] += 1
                self._crossing.setdefault(number - back, []).append(number)
        for position in graph.final:
            self._crossing.setdefault(base + position, [])
            self._ends_step[base + position] = index
        self._unsampled.append(len(graph.final))
        ready = [base + position for position in graph.roots if not tasks.waits[base + position]]
        while ready:
            number = heappop(ready)
            if tasks.lane_of[number] >= 0:
                self._enqueue(number, now)
                continue
            tasks.starts[number] = tasks.ends[number] = now
            for further in tasks.later[number]:
                tasks.waits[number + further] -= 1
                if not tasks.waits[number + further]:
                    heappush(ready, number + further)


class _PlayedTasks:
    """The tasks of the steps submitted so far, with one array per property."""

    __slots__ = ("classes", "durations", "ends", "lane_of", "later", "starts", "waits")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.durations: list[int] = []
        self.waits: list[int] = []
        self.later: list[tuple[int, ...]] = []
        self.lane_of: list[int] = []
        self.classes: list[int] = []

    def append(self, graph: StepGraph, durations: list[int]) -> None:
        """Add the tasks of a step, with their durations in nanoseconds."""
        unknown = [-1] * len(durations)
        self.starts += unknown
        self.ends += unknown
        self.durations += durations
        self.waits += graph.waits
        self.later += graph.later
        self.lane_of += graph.starts_on
        self.classes += graph.classes


class _PlayedLanes:
    """Running and waiting tasks of each lane, and the ends to come.

    Attributes:
        running: number of the running task by lane; -1 for none.
        waiting: heap of keys of waiting tasks by lane.
        events: heap of (end, lane) of the running tasks.
        admitted: number of collectives admitted to their lanes.
    """

    __slots__ = ("admitted", "events", "running", "waiting")

    def __init__(self, lanes: int) -> None:
        self.running = [-1] * lanes
        self.waiting: list[list[int]] = [[] for _ in range(lanes)]
        self.events: list[tuple[int, int]] = []
        self.admitted = 0

    def take(self, lane: int, number: int, before: int, now: int, tasks: _PlayedTasks) -> None:
        """Start a task on its lane at the time `now` if the lane is free, else put the task into the lane's heap.

        Args:
            number: the task's number.
            before: the high bits of the task's key, which go before the number.
        """
        if self.running[lane] < 0:
            self.running[lane] = number
            tasks.starts[number] = now
            heappush(self.events, (now + tasks.durations[number], lane))
        else:
            heappush(self.waiting[lane], before | number)
