"""Capture: records the graphs of a run's steps, which the policy submits to an engine that runs no task.

The graph of a policy that awaits no handle is the same in each step. Once two steps in a row have the same graph (the
same tasks on the same lanes, each waiting for tasks at the same distances back in program order), all later steps
except the last use that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

from moesched.drivers.policies import scheduled
from moesched.drivers.policy_state import state_of
from moesched.engine import Engine
from moesched.errors import MoeschedError
from moesched.seams import Policy, keeps_state
from moesched.steps.memory import counts_of
from moesched.steps.ruled_pool import RuledPool
from moesched.steps.run_state import RunState
from moesched.steps.step import Step
from moesched.steps.works import GROWING
from moesched.tasks import CLASS_SHIFT, Block, Collective, Lane, Task, class_of
from moesched.work import Work

T = TypeVar("T", bound=Task)

Words = list[int]
"""A set of tasks: bits in words of `WORD` bits, one bit for each task."""

WORD = 2048

Price = Callable[[Work], int]
"""Function from a `Work` (FLOPs and bytes of a task) to the nanoseconds that it takes alone."""


class NotFixed(MoeschedError):
    """Raised if the graphs of a policy's steps may differ, so that a few captured steps cannot stand for all.

    The policy awaited a handle, looked at the time, cancelled a task, has an eviction rule or state of its own, or
    failed.
    """


class CapturingEngine(Engine):
    """An engine that runs nothing and keeps every task, in program order."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        super().__init__(lanes)
        self._tasks: list[Task] = []
        self._taken = 0
        self.look = _no_time

    def submit(
        self,
        task: T,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        priority_class: int = 0,
    ) -> T:
        super().submit(task, reads, writes, after, priority_class)
        self._tasks.append(task)
        return task

    def cancel(self, task: Task) -> bool:
        raise NotFixed

    def take(self) -> list[Task]:
        """Return the tasks submitted since the last call, in program order."""
        tasks = self._tasks[self._taken :]
        self._taken += len(tasks)
        return tasks

    def forget(self) -> None:
        """Drop the references between captured tasks, so that the tasks are freed.

        Captured tasks never settle, and the garbage collector does not track tasks.
        """
        super().forget()
        for task in self._tasks:
            task.followers = task.operands = None
        for lane in self.lanes:
            lane.running = None
            lane.heap.clear()
            lane.queue.clear()
        self._tasks.clear()
        self.started.clear()


Sized = tuple[int, str, int]
"""Key of tasks with equal work in a step: (micro-batch, verb, number of the kind of layer)."""


class NumberedStep(Step):
    """A step that records whether the policy reads its number."""

    _asked = False

    @property
    def asked(self) -> bool:
        """True if the policy has read the step's number."""
        return self._asked

    @property
    def index(self) -> int:
        self._asked = True
        return self._number


class StepGraph:
    """The graph of one captured step. A task's position is its index among the step's tasks, in program order.

    Attributes:
        tasks: the captured tasks, joins included.
        first: id of the first task.
        lanes: for each task, the index of its lane among the run's lanes; -1 for a join, which has no lane.
        samples: positions of the `sample` tasks.
        final: positions of the tasks that must have ended for the step to end: the `samples`; in loading, all tasks.
        by_lane: for each lane, the positions of its tasks.
        starts_on: like `lanes`, but -2 minus the lane's index for a collective. This marks the collectives, which start
            after all other tasks that may start at the same time.
        classes: for each task, its priority class, shifted to the high bits of the key that orders tasks.
        edges: for each task, the distances back to the tasks that it waits for, counted in tasks of program order.
        waits: for each task, the number of its edges from tasks of this step.
        roots: positions of the tasks without edges from tasks of this step.
        later: for each task, the distances forward to the tasks of this step that wait for it.
        earlier: edges from tasks of earlier steps, as pairs (position of the waiting task, distance back).
        sized: positions of the tasks whose work changes from step to step, by (micro-batch, verb, kind of layer).
        kind_of: for each layer of the model, its kind of layer, as a number.
    """

    def __init__(
        self, tasks: list[Task], lanes: Sequence[Lane], edges: Edges, kind_of: Sequence[int]
    ) -> None:
        indices = {lane: index for index, lane in enumerate(lanes)}
        self.tasks = tasks
        self.first = tasks[0].id if tasks else 0
        self.lanes = [indices.get(task.lane, -1) for task in tasks]
        self.by_lane: list[list[int]] = [[] for _ in lanes]
        for position, number in enumerate(self.lanes):
            if number >= 0:
                self.by_lane[number].append(position)
        self.starts_on = [
            -2 - lane if isinstance(task, Collective) else lane
            for task, lane in zip(tasks, self.lanes, strict=True)
        ]
        self.classes = [class_of(task) << CLASS_SHIFT for task in tasks]
        self.samples = [position for position, task in enumerate(tasks) if task.verb == "sample"]
        self.final = self.samples or range(len(tasks))
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
        self.kind_of = kind_of
        self.sized: dict[Sized, list[int]] = {}
        for position, task in enumerate(tasks):
            if task.verb in GROWING:
                self.sized.setdefault(self.key(task), []).append(position)
        self._durations: list[int] = []
        self._works, self._work_of = _numbered_works(tasks, self.lanes)

    def key(self, task: Task) -> Sized:
        """Return (micro-batch, verb, kind of layer) of a task; equal keys in a step mean equal FLOPs and bytes."""
        return task.micro_batch, task.verb, self.kind_of[task.layer]

    def repeats(self, other: StepGraph) -> bool:
        """Test whether this step and another one have the same graph, apart from FLOPs and bytes."""
        return (
            self.edges == other.edges
            and self.lanes == other.lanes
            and self.classes == other.classes
            and [_identity(task) for task in self.tasks] == [_identity(task) for task in other.tasks]
        )

    def nanoseconds(self, price: Price, works: dict[Sized, Work]) -> list[int]:
        """Return the duration of each task of a step in nanoseconds, by position.

        Args:
            price: returns the nanoseconds of a `Work`.
            works: the FLOPs and bytes that differ between steps, by (micro-batch, verb, kind of layer).
        """
        if not self._durations:
            prices = [*map(price, self._works), 0]
            self._durations = [prices[number] for number in self._work_of]
        durations = self._durations.copy()
        for key, positions in self.sized.items():
            duration = price(works[key])
            for position in positions:
                durations[position] = duration
        return durations

    def forget_prices(self) -> None:
        """Drop cached durations, so that the next call of `nanoseconds` computes them with another cost model."""
        self._durations = []


def capture(run_state: RunState, policy: Policy) -> list[StepGraph]:
    """Capture the graphs of a whole run: of loading, of prefill, then of each decode step.

    Once two steps in a row have the same graph, the later one also stands for all steps after it except the last step
    of the run, which is captured, too. This is done only if the policy, in the later of the two steps, changed none of
    its attributes and did not read the step's number.

    Raises:
        NotFixed: the policy's steps may differ: it awaited a handle, has an eviction rule, or declares a state of its
            own; or it failed.
    """
    engine, pools = run_state.engine, run_state.plan.weights.pools
    assert isinstance(engine, CapturingEngine)
    if keeps_state(policy) or any(isinstance(pool, RuledPool) for pool in pools):
        raise NotFixed
    edges = Edges()
    count = run_state.steps
    numbered = False

    def submit(index: int) -> StepGraph:
        nonlocal numbered
        step = NumberedStep(run_state, index, last=index == count - 1)
        try:
            _run_through(scheduled(policy, step))
            step.close()
        except Exception as error:
            raise NotFixed from error  # a run that is not replayed fails likewise, and has a report
        numbered = step.asked
        return StepGraph(engine.take(), engine.lanes, edges, run_state.works.kind_of)

    for kept in run_state.plan.weights.resident:
        run_state.load(kept)
    run_state.fill()
    steps = [StepGraph(engine.take(), engine.lanes, edges, run_state.works.kind_of)]
    index = 0
    while index < count:
        counted = [counts_of(pool).now() for pool in pools]
        before = state_of(policy) if 1 < index < count - 2 else None
        steps.append(submit(index))
        index += 1
        left = count - 1 - index
        if (
            index > 2
            and left > 0
            and not numbered
            and steps[-1].repeats(steps[-2])
            and state_of(policy) == before
        ):
            steps += [steps[-1]] * left
            run_state.skip(left)
            for pool, since in zip(pools, counted, strict=True):
                counts_of(pool).repeat(since, left, engine.submitted, len(steps[-1].tasks))
            index += left
    return steps


class Edges:
    """Finds the edges between tasks, one step after the other, and leaves out edges that other edges imply.

    If task 3 waits for task 2, and task 2 for task 1, an edge from task 1 to task 3 is implied.
    """

    def __init__(self) -> None:
        self._last_on: dict[Lane, int] = {}
        self._first = 0
        self._lowest = 0
        self._reached: list[Words] = []

    def needed(self, tasks: Sequence[Task]) -> list[tuple[int, ...]]:
        """Return, for each task of the next step, the distances back to the tasks that it waits for, nearest first.

        Distances count tasks in program order. On an in-order lane, each task also waits for its predecessor there.
        """
        before = [self._before(task) for task in tasks]
        first = tasks[0].id if tasks else self._first
        self._forget_below(min([self._first, *(numbers[-1] for numbers in before if numbers)]))
        edges = []
        for task, numbers in zip(tasks, before, strict=True):
            reached: Words = [0] * ((task.id - self._lowest) // WORD + 1)
            needed: list[int] = []
            for number in numbers:
                word, bit = divmod(number - self._lowest, WORD)
                if reached[word] >> bit & 1:
                    continue
                if number >= self._first:
                    others = self._reached[number - self._first]
                    reached[: len(others)] = map(_union, reached, others) if needed else others
                needed.append(task.id - number)
                reached[word] |= 1 << bit
            self._reached.append(reached)
            edges.append(tuple(needed))
        del self._reached[: first - self._first]
        self._first = first
        return edges

    def _forget_below(self, number: int) -> None:
        """Make all sets of tasks in `self._reached` begin with the word that contains the bit of the task `number`.

        A set is a list of words (`Words`). Words before the new first one are dropped; missing words are added as 0.
        """
        lowest = number // WORD * WORD
        by = (lowest - self._lowest) // WORD
        if by:
            self._reached = [words[by:] if by > 0 else [0] * -by + words for words in self._reached]
        self._lowest = lowest

    def _before(self, task: Task) -> list[int]:
        before = set(task.deps)
        lane = task.lane
        if lane.in_order:
            if lane in self._last_on:
                before.add(self._last_on[lane])
            self._last_on[lane] = task.id
        return sorted(before, reverse=True)


def _union(mine: int, other: int) -> int:
    """Return the union of two words, integers with one bit for each task.

    If the union equals `other` or `mine`, that very object is returned, so that most words are in several sets at once,
    which saves memory.
    """
    if mine is other or not other:
        return mine
    both = mine | other
    return other if both == other else mine if both == mine else both


def _identity(task: Task) -> tuple[object, ...]:
    """Return the properties of a task that must be equal in two steps for the steps to have the same graph."""
    work = task.work
    return (task.verb, task.layer, task.micro_batch, task.expert, work.kind, work.resource, work.tokens)


def _numbered_works(tasks: Sequence[Task], lanes: Sequence[int]) -> tuple[list[Work], list[int]]:
    """Return the distinct `Work` objects of tasks, and for each task the index of its `Work` among them.

    Args:
        lanes: for each task, the index of its lane; below 0 for a join, which takes no time and gets the index -1.
    """
    works: list[Work] = []
    numbers: dict[int, int] = {}  # by id, since many tasks share a work
    work_of = []
    for task, lane in zip(tasks, lanes, strict=True):
        if lane >= 0 and id(task.work) not in numbers:
            numbers[id(task.work)] = len(works)
            works.append(task.work)
        work_of.append(numbers[id(task.work)] if lane >= 0 else -1)
    return works, work_of


def _no_time() -> NoReturn:
    raise NotFixed


def _run_through(main: Generator[Task, None, None]) -> None:
    try:
        main.send(None)
    except StopIteration:
        return
    with suppress(Exception):  # of a `finally` that awaits, which is in order where tasks run
        main.close()
    raise NotFixed
