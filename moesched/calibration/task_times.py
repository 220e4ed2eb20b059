"""Converts the timed tasks of small models to points of a cost table, and to speeds of tasks beside other tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import log2
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from moesched.calibration.contention import Observed, rates_beside
from moesched.calibration.exercise import FETCHED_LAYER, RESIDENT_LAYER
from moesched.machines import CostPoint
from moesched.machines.calibrated import (
    AWAIT,
    CACHED,
    CACHED_EXPERT,
    COMBINE_WITHIN,
    DISPATCH,
    HOP,
    ROUTE_WITHIN,
    work_class_of,
)
from moesched.machines.cost_model import at_once
from moesched.machines.product_times import RESIDENT
from moesched.models.config import DType, ModelConfig
from moesched.tasks import PageTransfer, Task
from moesched.work import Work, WorkPart

LEAST_SECONDS = 1e-6
WITHOUT_WEIGHTS = ("attention", "combine")
"""Verbs within a layer that use no weights."""


class Group(NamedTuple):
    """Key of tasks that should take equally long: tasks of one model, dtype, batch and verb.

    Attributes:
        batch: index of the batch of prompts.
        weights: the state of the weights, which begins the names of operations: "resident " if the weights stay in
            memory, "cached " if they were fetched for an earlier task, empty if they were fetched just before.
        number: index of the micro-batch; for an expert, the number of tokens that it computes, coarsely rounded.
    """

    model: str
    dtype: str
    batch: int
    verb: str
    weights: str
    number: int
    prefill: bool


class TaskKey(NamedTuple):
    """Key of a task, equal in all runs of one model.

    Attributes:
        batch: index of the batch of prompts.
        fresh: whether the task's weights were fetched just before.
    """

    model: str
    dtype: str
    batch: int
    fresh: bool
    step: int
    verb: str
    layer: int
    micro_batch: int
    expert: int


class RunKey(NamedTuple):
    """Identifies a run of a small model: the model, the dtype, and the index of the batch of prompts."""

    model: ModelConfig
    dtype: DType
    batch: int


class TaskTimes:
    """Times of tasks that ran alone, and speeds of tasks that ran beside others."""

    def __init__(self) -> None:
        self._times: dict[Group, list[float]] = {}
        self._works: dict[Group, Work] = {}
        self._used: dict[Group, list[int]] = {}
        self._alone: dict[TaskKey, list[float]] = {}
        self._gaps: dict[str, list[float]] = {DISPATCH: [], HOP: []}
        self._awaits: dict[int, list[float]] = {}
        self._moves: dict[WorkPart, list[float]] = {}

    def add(self, run: RunKey, tasks: Sequence[Task]) -> None:
        """Add a run whose tasks ran one by one: their times are the times of tasks alone.

        Tasks of experts whose weights were fetched for an earlier task also give points of the cost table. The times of
        fetches are recorded for `longer_than`, unless the fetches convert weights to another dtype.
        """
        self._add_means(run, (task for task in tasks if _is_cached_expert(task)), CACHED)
        for task in tasks:
            self._alone.setdefault(_key(run, task), []).append(_seconds(task))
            if task.verb == "fetch" and run.dtype == run.model.dtype:  # otherwise a fetch converts, too
                self._moves.setdefault(task.work.parts[0], []).append(_seconds(task))

    def add_resident(self, run: RunKey, tasks: Sequence[Task]) -> None:
        """Add a run whose tasks ran one by one with all weights in memory.

        Such runs are separate, since after a fetch every task is slower for a while: the processor has waited, and its
        caches have other data.
        """
        self._add_means(run, tasks, RESIDENT)
        self._add_awaits(tasks)

    def _add_awaits(self, tasks: Sequence[Task]) -> None:
        """Record the seconds from the end of each `route`, which the policy awaits, to the first expert's start.

        They are grouped by the number of tasks that the policy then submits, coarsely rounded.
        """
        submitted = _submitted_after(tasks)
        for before, after in pairwise(sorted(tasks, key=lambda task: task.start)):
            if (before.verb, after.verb) == ("route", "run_expert"):
                number = _half_octave(submitted[before.id])
                self._awaits.setdefault(number, []).append((after.start - before.end) / 1e9)

    def add_fresh(self, run: RunKey, tasks: Iterable[Task]) -> None:
        """Add a run in which weights were fetched for every micro-batch, as streaming policies do.

        A task is slower on weights that were just fetched, and after the processor waited for them.
        """
        fetched = [task for task in tasks if task.layer == FETCHED_LAYER]
        for task in fetched:
            self._alone.setdefault(_key(run, task, fresh=True), []).append(_seconds(task))
        on_weights = (task for task in fetched if task.verb not in ("fetch", *WITHOUT_WEIGHTS))
        self._add_means(run, on_weights)

    def _add_means(self, run: RunKey, tasks: Iterable[Task], weights: str = "") -> None:
        """Add the mean seconds of each group of tasks of a run.

        A group's first task, which chooses kernels for the others, counts only if there are no others.

        Args:
            weights: the state of the tasks' weights, as in `Group`.
        """
        times: dict[Group, list[float]] = {}
        for task in tasks:
            group = _group(run, task, weights)
            times.setdefault(group, []).append(_seconds(task))
            self._works.setdefault(group, task.work)
            if task.verb == "post_attention":
                self._used.setdefault(group, []).append(len(task.value))
        for group, seconds in times.items():
            self._times.setdefault(group, []).append(fmean(seconds[1:] or seconds))

    def add_gaps(self, tasks: Sequence[Task]) -> None:
        """Record the gaps in a run, in seconds from the end of a task to the start of a task that waited only for it.

        Gaps are recorded between tasks on the accelerator's lane, and across lanes from `pre_attention` to
        `cpu_attention`.
        """
        on_lane = [
            task for task in sorted(tasks, key=lambda task: task.start) if task.lane.name == "accelerator"
        ]
        self._gaps[DISPATCH] += [
            (after.start - before.end) / 1e9
            for before, after in pairwise(on_lane)
            if (before.step, before.layer) == (after.step, after.layer) == (after.step, RESIDENT_LAYER)
        ]
        ends = {
            (task.step, task.layer, task.micro_batch): task.end
            for task in tasks
            if task.verb == "pre_attention"
        }
        hops: dict[tuple[int, int], float] = {}
        for task in tasks:
            if task.verb == "cpu_attention":
                gap = (task.start - ends[task.step, task.layer, task.micro_batch]) / 1e9
                hops[task.step, task.layer] = min(gap, hops.get((task.step, task.layer), gap))
        self._gaps[HOP] += hops.values()

    def longer_than(self, link: str, seconds: Callable[[float, float], float]) -> Callable[[float], float]:
        """Return a function from a page's bytes to a ratio: the time of the page's transfer over the time of its reads.

        The ratio is interpolated between the sizes of the pages that were moved, and is 1 if no page was moved.

        Args:
            link: name of the link.
            seconds: a function from bytes and a number of reads to the seconds that these reads take when timed by
                themselves.
        """
        ratios = {
            part.size: median(times) / seconds(part.size, part.rows)
            for part, times in self._moves.items()
            if part.operation == link
        }
        sizes = sorted(ratios) or [0.0]
        by_size = [ratios.get(size, 1.0) for size in sizes]
        return lambda size: float(np.interp(size, sizes, by_size))

    def points(self) -> list[CostPoint]:
        """Return the points of the cost table: means over the tasks of a run, then medians over the runs.

        Within a run the mean is used, not the median, since slow tasks also add to a lane's busy time. Gaps between
        tasks are points as well.
        """
        found: dict[tuple[str, str, float, float], list[float]] = {}
        for each in (each for group in self._times for each in self._points_of(group)):
            found.setdefault((each.operation, each.dtype, each.rows, each.size), []).append(each.seconds)
        points = [point(*key, median(seconds)) for key, seconds in sorted(found.items())]
        between = {name: median(gaps) for name, gaps in self._gaps.items() if gaps}
        points += [point(name, "", 1, 0, seconds) for name, seconds in between.items()]
        dispatch = between.get(DISPATCH, 0.0)  # counts apart
        return points + [
            point(AWAIT, "", number, 0, median(gaps) - dispatch)
            for number, gaps in sorted(self._awaits.items())
        ]

    def speeds(self) -> dict[str, list[float]]:
        """Return the speeds of tasks in all runs, by class of work, relative to the median speed of equal tasks."""
        found: dict[str, list[float]] = {}
        for group, times in self._times.items():
            middle = median(times)
            found.setdefault(work_class_of(self._works[group]), []).extend(
                middle / each for each in times if each
            )
        return found

    def rates(
        self, run: RunKey, tasks: Sequence[Task], *, fresh: bool = False
    ) -> dict[tuple[str, str], float]:
        """Return the speeds at which a run's tasks ran beside others, relative to running alone.

        The keys are pairs: the class of the task's work, and the classes of the work beside it.

        Args:
            fresh: whether each task is compared with one that ran alone after a fetch of its weights (see `observed`).
        """
        return {
            (work_class, others): rate
            for work_class, group in self.observed(run, tasks, fresh=fresh).items()
            for others, rate in rates_beside(group).items()
        }

    def observed(
        self, run: RunKey, tasks: Sequence[Task], *, fresh: bool = False
    ) -> dict[str, list[Observed]]:
        """Return the tasks of a run that ran beside other tasks, by class of work.

        Prefill is left out: the first task of a size may take longer even alone.

        Args:
            fresh: whether the times of tasks alone are from runs given to `add_fresh`, in which weights were just
                fetched; otherwise from runs given to `add`.
        """
        observed: dict[str, list[Observed]] = {}
        for task in tasks:
            alone = self._alone.get(_key(run, task, fresh=fresh))
            if alone is not None and task.phase == "decode":
                each = Observed(fmean(alone), _seconds(task), _seconds_beside(task, tasks))
                observed.setdefault(work_class_of(task.work), []).append(each)
        return observed

    def _points_of(self, group: Group) -> Iterator[CostPoint]:
        work, seconds = self._works[group], median(self._times[group])
        part, prefix = work.parts[0], group.weights
        if group.verb in ("pre_attention", "route"):
            yield point(f"{prefix}{group.verb}", group.dtype, part.rows, part.size, seconds)
        elif group.verb == "run_expert":
            yield point(f"{prefix}expert", group.dtype, group.number, part.size, seconds)
        elif group.verb == "post_attention":
            yield from self._experts(group, prefix, seconds)
        elif group.verb == "attention":
            yield from self._attention(group, seconds)
        else:
            yield point(part.operation, group.dtype, part.rows, part.size, seconds)

    def _experts(self, group: Group, prefix: str, seconds: float) -> Iterator[CostPoint]:
        """Yield the costs of the parts of `post_attention`: of the router, and of each expert.

        The router's time is computed from the time of `pre_attention`. Both consist of products, and are assumed to
        take equally long per byte of weights. The time of a task `route` would be too long, since that task also hands
        the choices over to the host. The rest of `seconds`, which includes adding up the experts' outputs, is divided
        equally among the experts that the tokens chose. The time of a task `combine` is not subtracted, since most of
        it is the time of its call.

        Args:
            group: the measured group of `post_attention` tasks.
            prefix: beginning of the names of operations.
            seconds: time of a task of the group.
        """
        before = self._times.get(group._replace(verb="pre_attention", weights=RESIDENT))
        if before:
            parts = self._works[group].parts
            alike = self._works[group._replace(verb="pre_attention", weights=RESIDENT)].parts[0]
            route, experts = parts[0], [part for part in parts if part.operation.endswith("experts")]
            within = median(before) * route.size / alike.size
            yield point(f"{prefix}{ROUTE_WITHIN}", group.dtype, route.rows, route.size, within)
            yield point(COMBINE_WITHIN, group.dtype, 1, 0, 0.0)
            # Tokens of one prompt choose alike: fewer experts than the work's mean.
            used = fmean(self._used[group])
            rows = experts[0].rows * sum(part.times for part in experts) / used
            yield point(f"{prefix}experts", group.dtype, rows, experts[0].size, (seconds - within) / used)

    def _attention(self, group: Group, seconds: float) -> Iterator[CostPoint]:
        """Yield the costs of attention: the overhead of a task, the overhead of a call, and the time of one sequence.

        Args:
            seconds: time of an attention task of the group.
        """
        overheads = self._attention_overheads(group)
        if overheads is not None:
            common, call = overheads
            times = {part.operation: part for part in self._works[group].parts}
            each = times.get("step attention") or times["attention prompt"]
            calls = times["attention call"].times if "attention call" in times else 0
            yield point("attention", group.dtype, 1, 0, common)
            yield point("attention call", group.dtype, 1, 0, call)
            rest = (seconds - common - calls * call) / each.times
            yield point(each.operation, group.dtype, each.rows, each.size, rest)

    def _attention_overheads(self, group: Group) -> tuple[float, float] | None:
        """Return the overheads in seconds of `group`'s attention tasks and of each call; None if too little was timed.

        The overheads follow from three decode tasks of similar context: one with a single sequence, one with many
        sequences in one call, and one with a call for each of its sequences.
        """
        alike = []
        for each, times in self._times.items():
            if each._replace(batch=0, number=0) == group._replace(batch=0, number=0, prefill=False):
                parts = {part.operation: part for part in self._works[each].parts}
                sequence = parts["step attention"]
                alike.append((parts["attention call"].times, sequence.times, sequence.size, median(times)))
        single = min((each for each in alike if each[1] == 1), key=lambda each: each[2], default=None)
        joined = max((each for each in alike if each[0] == 1), key=lambda each: each[1], default=None)
        split = max((each for each in alike if each[0] == each[1]), key=lambda each: each[1], default=None)
        if single is None or joined is None or split is None or joined[1] == 1 or split[1] == 1:
            return None
        sequence_seconds = max(0.0, (joined[3] - single[3]) / (joined[1] - 1))
        call_seconds = (split[3] - single[3]) / (split[1] - 1) - sequence_seconds
        call_seconds = max(LEAST_SECONDS, call_seconds)
        return max(LEAST_SECONDS, single[3] - call_seconds - sequence_seconds), call_seconds


def point(operation: str, dtype: str, rows: float, size: float, seconds: float) -> CostPoint:
    """Return a point of the cost table (see `CostPoint`), with figures rounded to four significant digits."""
    return CostPoint(
        operation=operation,
        dtype=dtype,
        rows=rounded(rows),
        size=rounded(size),
        seconds=rounded(max(LEAST_SECONDS, seconds)),
    )


def rounded(number: float) -> float:
    """Round to four significant digits."""
    return float(f"{number:.4g}")


def _is_cached_expert(task: Task) -> bool:
    """Test whether a task runs an expert whose weights were fetched for an earlier task."""
    return task.verb == "run_expert" and task.work.parts[0].operation == CACHED_EXPERT


def _submitted_after(tasks: Iterable[Task]) -> dict[int, int]:
    """Return, by the id of each awaited task, the number of tasks that the policy submits until it awaits another one.

    A policy of a calibration awaits `route` tasks, and the last task of each step.
    """
    last = {task.step: task.id for task in sorted(tasks, key=lambda task: task.id)}
    awaited = sorted({*last.values(), *(task.id for task in tasks if task.verb == "route")})
    return {each: following - each for each, following in pairwise(awaited)}


def _half_octave(number: float) -> int:
    """Round to the nearest power of the square root of 2, and that to a whole number."""
    return round(2 ** (round(2 * log2(number)) / 2))


def _group(run: RunKey, task: Task, weights: str) -> Group:
    model, dtype, batch = run
    if task.verb == "run_expert":
        rows = _half_octave(task.work.tokens)
        return Group(model.name, dtype, batch, task.verb, weights, rows, False)
    if task.verb in ("embed", "sample", *WITHOUT_WEIGHTS):
        weights = ""
    return Group(model.name, dtype, batch, task.verb, weights, task.micro_batch, task.phase == "prefill")


def _key(run: RunKey, task: Task, *, fresh: bool = False) -> TaskKey:
    model, dtype, batch = run
    verb = "attention" if task.verb == "cpu_attention" else task.verb
    expert = task.expert
    if isinstance(task, PageTransfer) and task.pages:
        expert = task.pages[0].expert
    return TaskKey(model.name, dtype, batch, fresh, task.step, verb, task.layer, task.micro_batch, expert)


def _seconds_beside(task: Task, tasks: Sequence[Task]) -> dict[str, float]:
    """Return the seconds of a task during which other lanes were busy, by the mix of classes of work on those lanes."""
    others = [
        each
        for each in tasks
        if each.lane is not task.lane and each.start < task.end and each.end > task.start
    ]
    changes = {task.start, task.end, *(each.start for each in others), *(each.end for each in others)}
    seconds: dict[str, float] = {}
    for start, end in pairwise(sorted(each for each in changes if task.start <= each <= task.end)):
        classes = [work_class_of(each.work) for each in others if each.start <= start and each.end >= end]
        if classes:
            seconds[at_once(classes)] = seconds.get(at_once(classes), 0.0) + (end - start) / 1e9
    return seconds


def _seconds(task: Task) -> float:
    return (task.end - task.start) / 1e9
