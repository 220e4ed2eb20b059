"""Capture and replay: a schedule that awaits nothing is a fixed graph, which need not be built again for every step.

The policy submits a few steps to an engine that runs nothing. Once two steps in a row have the same graph (the same
tasks on the same lanes, with edges equally far back in program order), the following ones run over arrays, with
durations evaluated anew for each step. The timeline is the one that the virtual driver would have made, to the
nanosecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import msgspec

from moesched.drivers.pricing import nanoseconds, no_garbage_collection
from moesched.engine import Engine
from moesched.errors import MoeschedError
from moesched.seams import CostModel, Policy
from moesched.steps.run_state import GROWING, RunState
from moesched.steps.step import Step
from moesched.tasks import DONE, Collective, Lane, Task, Work, link_class

Price = Callable[[Work], int]
WorkOfVerb = Callable[[int, str], Work]

_CLASS_SHIFT = 48
_NUMBER = (1 << _CLASS_SHIFT) - 1


class NotFixed(MoeschedError):
    """The policy awaited a handle: its graph depends on what happens, and cannot be captured."""


class CapturingEngine(Engine):
    """An engine that runs nothing and keeps every task, in program order."""

    submit_frames = 3

    def __init__(self, lanes: Iterable[Lane]) -> None:
        super().__init__(lanes)
        self.tasks: list[Task] = []

    def submit(self, task: Any, *arguments: Any, **named: Any) -> Any:
        super().submit(task, *arguments, **named)
        self.tasks.append(task)
        return task

    def take(self) -> list[Task]:
        """The tasks submitted since the last call."""
        tasks, self.tasks = self.tasks, []
        return tasks


class Template:
    """The graph of one step, by positions in program order.

    Attributes:
        tasks: the captured tasks, joins included.
        lanes: each task's lane by its index; -1 for joins.
        starts_on: the same, but -2 - lane for collectives, which take their lane once all else of that moment did.
        classes: each task's link class, in the high bits of a priority.
        waits: how many of a task's edges come from within the step.
        roots: positions of the tasks with no such edge.
        later: how much further on the tasks are that wait for each one.
        earlier: edges from earlier steps, as (position, how far back).
        sized: positions of the tasks whose work changes from step to step, by micro-batch and verb.
    """

    def __init__(self, tasks: list[Task], lanes: Sequence[Lane], edges: Edges) -> None:
        indices = {lane: index for index, lane in enumerate(lanes)}
        self.tasks = tasks
        self.first = tasks[0].id if tasks else 0
        self.lanes = [indices.get(task.lane, -1) for task in tasks]
        self.starts_on = [
            -2 - lane if isinstance(task, Collective) else lane
            for task, lane in zip(tasks, self.lanes, strict=True)
        ]
        self.classes = [link_class(task.key) << _CLASS_SHIFT for task in tasks]
        self.samples = [position for position, task in enumerate(tasks) if task.verb == "sample"]
        self.edges = edges.needed(tasks)
        self.earlier: list[tuple[int, int]] = []
        self.waits = [0] * len(tasks)
        later: list[list[int]] = [[] for _ in tasks]
        for position, backs in enumerate(self.edges):
            for back in backs:
                if back > position:
                    self.earlier.append((position, back))
                else:
                    later[position - back].append(back)
                    self.waits[position] += 1
        self.roots = [position for position, waits in enumerate(self.waits) if not waits]
        self.later = [tuple(each) for each in later]
        self.sized: dict[tuple[int, str], list[int]] = {}
        for position, task in enumerate(tasks):
            if task.verb in GROWING:
                self.sized.setdefault((task.micro_batch, task.verb), []).append(position)
        self._durations: list[int] = []

    def repeats(self, other: Template) -> bool:
        """Whether this step does what another one did, only on other data."""
        return (
            self.edges == other.edges
            and self.lanes == other.lanes
            and self.classes == other.classes
            and [_what(task) for task in self.tasks] == [_what(task) for task in other.tasks]
        )

    def nanoseconds(self, price: Price, works: dict[tuple[int, str], Work]) -> list[int]:
        """The tasks' durations in a step with these works of micro-batches and verbs."""
        if not self._durations:
            self._durations = [
                price(task.work) if lane >= 0 else 0
                for task, lane in zip(self.tasks, self.lanes, strict=True)
            ]
        durations = self._durations.copy()
        for key, positions in self.sized.items():
            duration = price(works[key])
            for position in positions:
                durations[position] = duration
        return durations


class Timeline:
    """When every task of a replayed run started and ended; tasks are numbered as they would have been submitted.

    `works` are those of each step that differ between steps, by micro-batch and verb.
    """

    def __init__(
        self,
        steps: list[Template],
        works: list[dict[tuple[int, str], Work]],
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
        """How many tasks there are, without joins."""
        return sum(sum(lane >= 0 for lane in step.lanes) for step in self.steps)

    def step_ends(self) -> list[int]:
        """When loading ended, and when each step had its samples."""
        ends, base = [], 0
        for index, step in enumerate(self.steps):
            last = step.samples if index else range(len(step.tasks))
            ends.append(max((self.ends[base + position] for position in last), default=0))
            base += len(step.tasks)
        return ends

    def prefill_samples(self) -> dict[int, int]:
        """When each micro-batch of prefill had its tokens, by its number."""
        base, prefill = len(self.steps[0].tasks), self.steps[1]
        return {prefill.tasks[place].micro_batch: self.ends[base + place] for place in prefill.samples}

    def busy(self, lanes: Sequence[Lane]) -> dict[str, int]:
        """How long each lane was busy after loading."""
        busy = [0] * len(lanes)
        base = 0
        for index, step in enumerate(self.steps):
            if index:
                for number, lane in enumerate(step.lanes, base):
                    if lane >= 0:
                        busy[lane] += self.ends[number] - self.starts[number]
            base += len(step.tasks)
        return {lane.name: nanoseconds for lane, nanoseconds in zip(lanes, busy, strict=True)}

    def awaits(self) -> list[tuple[int, int]]:
        """Which tasks were waited for, and how many had been submitted by then: as `Player` submits the steps."""
        awaits = []
        bases = [0, *accumulate(len(step.tasks) for step in self.steps)]
        for index in range(1, len(self.steps)):
            before = max(0, index - 2)
            step = self.steps[before]
            if before or index == 1:
                last = step.samples if before else range(len(step.tasks))
                awaits += [(bases[before] + position, bases[index]) for position in last]
        return awaits

    def tasks(self) -> Iterator[Task]:
        """The tasks as a driver would have told an observer of them, step by step; joins too."""
        number = 0
        for index, template in enumerate(self.steps):
            shift = number - template.first
            for captured in template.tasks:
                yield msgspec.structs.replace(
                    captured,
                    work=_resized(
                        captured.work, self.works[index].get((captured.micro_batch, captured.verb))
                    ),
                    id=number,
                    step=index - 1,
                    state=DONE,
                    start=self.starts[number],
                    end=self.ends[number],
                    deps=[each + shift for each in captured.deps],
                    followers=None,
                )
                number += 1


def _resized(captured: Work, work: Work | None) -> Work:
    """A captured task's work in another step; at a later stage of a pipeline it is that of the first one elsewhere."""
    if work is None or work.resource == captured.resource:
        return work or captured
    return msgspec.structs.replace(work, kind=captured.kind, resource=captured.resource)


@runtime_checkable
class ReplayObserver(Protocol):
    """An observer that wants a replayed run as a whole, since making its tasks takes longer than replaying it."""

    def replayed(self, timeline: Timeline) -> None:
        """Told once, instead of `ended` for each task."""


def replay_run(run_state: RunState, policy: Policy, cost: CostModel) -> Timeline:
    """Capture a run and play it, without garbage collection, which finds nothing here.

    Raises:
        NotFixed: the policy awaited a handle.
    """

    def sizes_of(index: int) -> WorkOfVerb:
        if index >= 0:
            run_state.size(index)
        return lambda micro_batch, verb: run_state.numbered(micro_batch).works[verb]

    with no_garbage_collection():
        steps = capture(run_state, policy)
        return Player(
            steps, len(run_state.engine.lanes), lambda work: nanoseconds(work, cost), sizes_of
        ).run()


def capture(run_state: RunState, policy: Policy) -> list[Template]:
    """The graphs of a whole run: of loading, of prefill, then of each decode step.

    Raises:
        NotFixed: the policy awaited a handle.
    """
    engine = run_state.engine
    assert isinstance(engine, CapturingEngine)
    edges = Edges()
    count = run_state.steps

    def submit(index: int) -> Template:
        step = Step(run_state, index, last=index == count - 1)
        _run_through(policy.decode(step) if index else policy.prefill(step))
        step.close()
        return Template(engine.take(), engine.lanes, edges)

    for kept in run_state.plan.resident:
        run_state.load(kept)
    run_state.fill()
    steps = [Template(engine.take(), engine.lanes, edges)]
    index = 0
    while index < count:
        steps.append(submit(index))
        index += 1
        left = count - 1 - index
        if index > 2 and left > 0 and steps[-1].repeats(steps[-2]):
            steps += [steps[-1]] * left
            run_state.skip(left)
            index += left
    return steps


class Player:
    """Runs captured steps on ready-first lanes, over arrays that grow as steps are submitted.

    A step is submitted once the samples of the step before the last one are there, as `Generation` does.

    Args:
        steps: as `capture` gives them.
        lanes: how many lanes there are.
        price: a work's nanoseconds.
        sizes_of: the works that belong to a step, by its index.
    """

    def __init__(
        self, steps: Sequence[Template], lanes: int, price: Price, sizes_of: Callable[[int], WorkOfVerb]
    ) -> None:
        self._steps = steps
        self._price = price
        self._sizes_of = sizes_of
        self._submitted = 0
        self._step_ended = False
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._works: list[dict[tuple[int, str], Work]] = []
        self._durations: list[int] = []
        self._waits: list[int] = []
        self._later: list[tuple[int, ...]] = []
        self._lane_of: list[int] = []
        self._classes: list[int] = []
        self._crossing: dict[int, list[int]] = {}
        self._ends_step: dict[int, int] = {}
        self._unsampled: list[int] = []
        self._running = [-1] * lanes
        self._waiting: list[list[int]] = [[] for _ in range(lanes)]
        self._events: list[tuple[int, int]] = []
        self._joins: deque[int] = deque()
        self._arrived: list[int] = []
        self._admitted = 0

    def run(self) -> Timeline:
        """Play all steps."""
        starts, ends, durations, waits = self._starts, self._ends, self._durations, self._waits
        later, lane_of, classes, crossing = self._later, self._lane_of, self._classes, self._crossing
        running, waiting, events, joins = self._running, self._waiting, self._events, self._joins
        arrived = self._arrived
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
        return Timeline(list(self._steps), self._works, starts, ends)

    def _cross(self, number: int, now: int) -> None:
        """Pass on to later steps that a task ended, and note whether it was the last one that a step waits for."""
        for other in self._crossing.pop(number):
            self._waits[other] -= 1
            if not self._waits[other]:
                if self._lane_of[other] < -1:
                    self._arrived.append(other)
                elif self._lane_of[other] < 0:
                    self._starts[other] = self._ends[other] = now
                    self._joins.append(other)
                else:
                    self._enqueue(other, now)
        index = self._ends_step.pop(number, -1)
        if index >= 0:
            self._unsampled[index] -= 1
            self._step_ended = not self._unsampled[index]

    def _admit(self, now: int) -> None:
        """Let collectives on their lanes, before all but earlier ones, as `Engine.admit` does."""
        for number in self._arrived:
            self._take(-2 - self._lane_of[number], number, (self._admitted - _NUMBER) << _CLASS_SHIFT, now)
            self._admitted += 1
        self._arrived.clear()

    def _enqueue(self, number: int, now: int) -> None:
        self._take(self._lane_of[number], number, self._classes[number], now)

    def _take(self, lane: int, number: int, before: int, now: int) -> None:
        """Start a task on its lane, or have it wait there; `before` are the high bits of its priority."""
        if self._running[lane] < 0:
            self._running[lane] = number
            self._starts[number] = now
            heappush(self._events, (now + self._durations[number], lane))
        else:
            heappush(self._waiting[lane], before | number)

    def _submit_ready(self, now: int) -> None:
        """Submit the steps whose time has come: prefill and the first decode step wait for loading only."""
        self._step_ended = False
        while self._submitted < len(self._steps):
            index = self._submitted
            if index and self._unsampled[max(0, index - 2)]:
                return
            self._submit(index, now)

    def _submit(self, index: int, now: int) -> None:
        template = self._steps[index]
        base, size = len(self._starts), len(template.tasks)
        waits, ends, later = self._waits, self._ends, self._later
        self._starts += [-1] * size
        ends += [-1] * size
        sizes = self._sizes_of(index - 1)
        self._works.append({key: sizes(*key) for key in template.sized})
        self._durations += template.nanoseconds(self._price, self._works[-1])
        waits += template.waits
        later += template.later
        self._lane_of += template.starts_on
        self._classes += template.classes
        for position, back in template.earlier:
            number = base + position
            if ends[number - back] < 0:
                waits[number] += 1
                self._crossing.setdefault(number - back, []).append(number)
        last = template.samples if index else range(size)
        for position in last:
            self._crossing.setdefault(base + position, [])
            self._ends_step[base + position] = index
        self._unsampled.append(len(last))
        self._submitted = index + 1
        ready = [base + position for position in template.roots if not waits[base + position]]
        while ready:
            number = heappop(ready)
            if self._lane_of[number] >= 0:
                self._enqueue(number, now)
                continue
            self._starts[number] = ends[number] = now
            for further in later[number]:
                waits[number + further] -= 1
                if not waits[number + further]:
                    heappush(ready, number + further)


class Edges:
    """Which edges a step's tasks need; those that others imply are left out.

    It sees one step after the other, and remembers what was reached from the tasks of the step before.
    """

    def __init__(self) -> None:
        self._last_on: dict[Lane, int] = {}
        self._first = 0
        self._lowest = 0
        self._reach: list[int] = []

    def needed(self, tasks: Sequence[Task]) -> list[tuple[int, ...]]:
        """For each task of the next step, how far back those tasks are that it must wait for, the nearest first.

        An in-order lane is one more edge: to the task before on the same lane.
        """
        before = [self._before(task) for task in tasks]
        first = tasks[0].id if tasks else self._first
        lowest = min((numbers[-1] for numbers in before if numbers), default=first)
        lowest = min(lowest, self._first)
        reach = [_shifted(reached, lowest - self._lowest) for reached in self._reach]
        edges = []
        for task, numbers in zip(tasks, before, strict=True):
            reached = 0
            needed = []
            for number in numbers:
                if not reached >> (number - lowest) & 1:
                    needed.append(task.id - number)
                    reached |= 1 << (number - lowest)
                    if number >= self._first:
                        reached |= reach[number - self._first]
            reach.append(reached)
            edges.append(tuple(needed))
        self._reach = reach[first - self._first :]
        self._first, self._lowest = first, lowest
        return edges

    def _before(self, task: Task) -> list[int]:
        before = set(task.deps)
        lane = task.lane
        if lane.in_order:
            if lane in self._last_on:
                before.add(self._last_on[lane])
            self._last_on[lane] = task.id
        return sorted(before, reverse=True)


def _shifted(bits: int, by: int) -> int:
    """Bits counted from a number that is higher by so much."""
    return bits >> by if by >= 0 else bits << -by


def _what(task: Task) -> tuple[Any, ...]:
    """What a task does, whichever step it belongs to."""
    work = task.work
    return (task.verb, task.layer, task.micro_batch, task.expert, work.kind, work.resource, work.tokens)


def _run_through(main: Coroutine[Any, Any, Any]) -> None:
    try:
        main.send(None)
    except StopIteration:
        return
    main.close()
    raise NotFixed
