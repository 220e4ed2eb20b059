"""From the tasks of small models to the points of a cost table, and to how much tasks slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import log2
from statistics import fmean, median
from typing import NamedTuple

from moesched.calibration.contention import Observed, rates_beside
from moesched.calibration.exercise import FETCHED_LAYER, KEPT_LAYER
from moesched.machines import CostPoint
from moesched.machines.cost import DISPATCH, HOP, sort_of
from moesched.models.config import ModelConfig
from moesched.seams import at_once
from moesched.tasks import Task, Work, WorkPart

LEAST_SECONDS = 1e-6
WITHOUT_WEIGHTS = ("attention", "combine")
"""What a layer does without weights of its own."""


class Group(NamedTuple):
    """Tasks that take the same: one verb on one micro-batch or, for experts, on nearly as many tokens."""

    model: str
    dtype: str
    verb: str
    resident: bool
    which: int
    prefill: bool


class Same(NamedTuple):
    """The same task in every run of one model."""

    model: str
    dtype: str
    step: int
    verb: str
    layer: int
    micro_batch: int
    expert: int


class TaskTimes:
    """What tasks took, alone and beside others."""

    def __init__(self) -> None:
        self._times: dict[Group, list[float]] = {}
        self._works: dict[Group, Work] = {}
        self._alone: dict[Same, list[float]] = {}
        self._gaps: dict[str, list[float]] = {DISPATCH: [], HOP: []}
        self._moves: dict[WorkPart, list[float]] = {}

    def add(self, model: ModelConfig, dtype: str, tasks: Iterable[Task]) -> None:
        """Take in a run that did one task after the other.

        Of what takes weights that were fetched, others of their micro-batches took them before: only what such tasks
        are slowed by is told from it, and `add_fresh` has what they take.
        """
        times: dict[Group, list[float]] = {}
        for task in tasks:
            self._alone.setdefault(_same(model, dtype, task), []).append(_seconds(task))
            if task.verb == "fetch":
                if dtype == model.dtype:  # else it is converted, too
                    self._moves.setdefault(task.work.parts[0], []).append(_seconds(task))
            elif task.layer != FETCHED_LAYER or task.verb in WITHOUT_WEIGHTS:
                times.setdefault(_group(model, dtype, task), []).append(_seconds(task))
                self._works.setdefault(_group(model, dtype, task), task.work)
        self._take_means(times)

    def add_fresh(self, model: ModelConfig, dtype: str, tasks: Iterable[Task]) -> None:
        """Take in a run in which every micro-batch's weights were fetched just before, as those that stream are.

        The first use of such weights is slower than the next, and so is a processor that waited for them.
        """
        times: dict[Group, list[float]] = {}
        for task in tasks:
            if task.layer == FETCHED_LAYER and task.verb not in ("fetch", *WITHOUT_WEIGHTS):
                times.setdefault(_group(model, dtype, task), []).append(_seconds(task))
                self._works.setdefault(_group(model, dtype, task), task.work)
        self._take_means(times)

    def _take_means(self, times: Mapping[Group, Sequence[float]]) -> None:
        for group, seconds in times.items():
            self._times.setdefault(group, []).append(fmean(seconds))

    def add_gaps(self, tasks: Sequence[Task]) -> None:
        """Take in what lies between tasks where nothing else was waited for: on one lane, and from lane to lane."""
        on_lane = [task for task in sorted(tasks, key=_start) if task.lane.name == "accelerator"]
        self._gaps[DISPATCH] += [
            (after.start - before.end) / 1e9
            for before, after in pairwise(on_lane)
            if (before.step, before.layer) == (after.step, after.layer) == (after.step, KEPT_LAYER)
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

    def longer_than(self, link: str, seconds: Callable[[float, float], float]) -> float:
        """How many times as long as by themselves pages took to move; 1 where none was moved.

        seconds: of so many bytes in so many pieces, by themselves.
        """
        ratios = [
            median(times) / seconds(part.size, part.rows)
            for part, times in self._moves.items()
            if part.operation == link
        ]
        return median(ratios) if ratios else 1.0

    def points(self) -> list[CostPoint]:
        """The table's points: of an operation's times in one run the mean, of several runs the median.

        A lane is busy for the sum of its tasks, so that of tasks that take longer now and then the mean tells.
        """
        found: dict[tuple[str, str, float, float], list[float]] = {}
        for each in (each for group in self._times for each in self._points_of(group)):
            found.setdefault((each.operation, each.dtype, each.rows, each.size), []).append(each.seconds)
        points = [point(*what, median(seconds)) for what, seconds in sorted(found.items())]
        return points + [point(name, "", 1, 0, median(gaps)) for name, gaps in self._gaps.items() if gaps]

    def rates(self, model: ModelConfig, dtype: str, tasks: Sequence[Task]) -> dict[tuple[str, str], float]:
        """How fast tasks went on beside others, relative to being alone, by (sort, sorts of the others).

        Prefill is left out: what meets a size for the first time may take longer alone.
        """
        observed: dict[str, list[Observed]] = {}
        for task in tasks:
            alone = self._alone.get(_same(model, dtype, task))
            if alone is not None and task.step > 0:
                each = Observed(fmean(alone), _seconds(task), _seconds_beside(task, tasks))
                observed.setdefault(sort_of(task.work), []).append(each)
        return {
            (sort, others): rate
            for sort, group in observed.items()
            for others, rate in rates_beside(group).items()
        }

    def _points_of(self, group: Group) -> Iterator[CostPoint]:
        work, seconds = self._works[group], median(self._times[group])
        place = "kept " if group.resident else ""
        part = work.parts[0]
        if group.verb in ("pre_attention", "route"):
            yield point(f"{place}{group.verb}", group.dtype, part.rows, part.size, seconds)
        elif group.verb == "run_expert":
            yield point(f"{place}expert", group.dtype, group.which, part.size, seconds)
        elif group.verb == "post_attention":
            yield from self._experts(group, place, seconds)
        elif group.verb == "attention":
            yield from self._attention(group, seconds)
        else:
            yield point(part.operation, group.dtype, part.rows, part.size, seconds)

    def _experts(self, group: Group, place: str, seconds: float) -> Iterator[CostPoint]:
        """What a layer's experts take together, over and above what comes before and after them."""
        before = self._times.get(group._replace(verb="route"))
        after = self._times.get(group._replace(verb="combine", resident=False))
        experts = [part for part in self._works[group].parts if part.operation.endswith("experts")]
        if before and after:
            rest = (seconds - median(before) - median(after)) / sum(part.times for part in experts)
            yield point(f"{place}experts", group.dtype, experts[0].rows, experts[0].size, rest)

    def _attention(self, group: Group, seconds: float) -> Iterator[CostPoint]:
        """What one sequence takes: what a task's calls have in common is told from it by `_attention_overheads`."""
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
        """Seconds of any attention task, and of each of its calls: from decode tasks of about the same context.

        The first has one sequence, the second many sequences in one call, the third each of its sequences in a call.
        """
        alike = []
        for each, times in self._times.items():
            if each._replace(which=0) == group._replace(which=0, prefill=False):
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
    """A measured point, to four digits."""
    return CostPoint(
        operation=operation,
        dtype=dtype,
        rows=rounded(rows),
        size=rounded(size),
        seconds=rounded(max(LEAST_SECONDS, seconds)),
    )


def rounded(number: float) -> float:
    """To four digits: more were not measured."""
    return float(f"{number:.4g}")


def _group(model: ModelConfig, dtype: str, task: Task) -> Group:
    resident = task.layer == KEPT_LAYER
    if task.verb == "run_expert":
        rows = round(2 ** (round(2 * log2(task.work.tokens)) / 2))
        return Group(model.name, dtype, task.verb, resident, rows, False)
    if task.verb in ("embed", "sample", *WITHOUT_WEIGHTS):
        resident = False
    return Group(model.name, dtype, task.verb, resident, task.micro_batch, task.step == 0)


def _same(model: ModelConfig, dtype: str, task: Task) -> Same:
    verb = "attention" if task.verb == "cpu_attention" else task.verb
    return Same(model.name, dtype, task.step, verb, task.layer, task.micro_batch, task.expert)


def _seconds_beside(task: Task, tasks: Sequence[Task]) -> dict[str, float]:
    """Seconds of the task during which others ran on other lanes, by the sorts of those that ran at once."""
    others = [
        each
        for each in tasks
        if each.lane is not task.lane and each.start < task.end and each.end > task.start
    ]
    changes = {task.start, task.end, *(each.start for each in others), *(each.end for each in others)}
    seconds: dict[str, float] = {}
    for start, end in pairwise(sorted(each for each in changes if task.start <= each <= task.end)):
        sorts = [sort_of(each.work) for each in others if each.start <= start and each.end >= end]
        if sorts:
            seconds[at_once(sorts)] = seconds.get(at_once(sorts), 0.0) + (end - start) / 1e9
    return seconds


def _seconds(task: Task) -> float:
    return (task.end - task.start) / 1e9


def _start(task: Task) -> int:
    return task.start
