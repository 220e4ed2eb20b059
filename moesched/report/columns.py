"""Converts a run's tasks, dependencies, waits and samples to columns of numbers, from which a page's scripts draw.

A task that ran is called a slice; slices are in order of their ends. Times are nanoseconds on the run's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from moesched.analysis.families import COLOURS, family_of
from moesched.report.packing import Columns
from moesched.trace.recording import LaneName, MemorySample, PoolSample, Recording, TaskInfo
from moesched.trace.summary import summarize
from moesched.trace.waits import waits_of

Value = TypeVar("Value")

FAMILIES = tuple(COLOURS)
WHY = ("start", "data", "room", "lane", "rank", "await")
STATES = ("done", "failed")


def run_columns(columns: Columns, title: str, recording: Recording, shift: int = 0) -> dict[str, Any]:
    """Add a run's numbers to `columns`, and return the JSON value of the run, which refers to these columns.

    Args:
        columns: the columns of the page's data.
        title: the run's title on the page.
        shift: nanoseconds that the page adds to the run's times, to draw it beside other runs.
    """
    return {
        "title": title,
        "shift": shift,
        "start": recording.start,
        "end": recording.end,
        "trimmed": recording.trimmed,
        "lanes": [{"rank": lane.rank, "name": lane.name} for lane in recording.lanes],
        "steps": [
            {"step": each.step, "start": round(each.start * 1e9), "end": round(each.end * 1e9)}
            for each in summarize(recording).steps
        ],
        **_tasks_and_slices(columns, recording),
        **_edges(columns, recording),
        **_waits(columns, recording),
        "memory": _memory(columns, recording),
        "pools": _pools(columns, recording),
    }


class _Numbered(Generic[Value]):
    """Gives each different value a number from 0, in the order in which the values are first seen.

    `known` values get the first numbers.
    """

    def __init__(self, known: Iterable[Value] = ()) -> None:
        self.numbers: dict[Value, int] = {each: number for number, each in enumerate(known)}

    def of(self, value: Value) -> int:
        """Return the number of a value; a new value gets the next number."""
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[Value]:
        """All values in the order of their numbers."""
        return list(self.numbers)


class _NumberedTasks(_Numbered[TaskInfo]):
    """Gives each different task description a number from 0, in the order in which the descriptions are first seen.

    An object that was seen before is found by its identity, which is faster than a comparison of all fields.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_identity: dict[int, int] = {}

    def of(self, value: TaskInfo) -> int:
        """Return the number of a task's description; equal descriptions share a number, a new one gets the next."""
        number = self._by_identity.get(id(value))
        if number is None:
            number = self._by_identity[id(value)] = super().of(value)
        return number


def _tasks_and_slices(columns: Columns, recording: Recording) -> dict[str, Any]:
    slices = recording.slices
    lanes: dict[LaneName, int] = {lane: number for number, lane in enumerate(recording.lanes)}
    tasks, lines, states, choices = _NumberedTasks(), _Numbered([""]), _Numbered[str](STATES), _Numbered([""])
    slice_columns = {
        "id": columns.add("i32", (each.id for each in slices)),
        "start": columns.add("f64", (each.start for each in slices)),
        "duration": columns.add("f64", (each.end - each.start for each in slices)),
        "lane": columns.add("u16", (lanes[each.lane] for each in slices)),
        "task": columns.add("u32", (tasks.of(each.task) for each in slices)),
        "step": columns.add("i32", (each.step for each in slices)),
        "line": columns.add("u32", (lines.of(each.line) for each in slices)),
        "state": columns.add("u8", (states.of(each.state) for each in slices)),
        "choice": columns.add("u32", (choices.of(_choice(each.experts)) for each in slices)),
    }
    cancelled = {
        "time": columns.add("f64", (each.time for each in recording.cancelled)),
        "lane": columns.add("u16", (lanes[each.lane] for each in recording.cancelled)),
        "task": columns.add("u32", (tasks.of(each.task) for each in recording.cancelled)),
    }
    return {
        "slices": slice_columns,
        "cancelled": cancelled,
        "lines": lines.values,
        "states": states.values,
        "choices": choices.values,
        "tasks": _tasks(columns, tasks.values),
    }


def _choice(experts: Mapping[int, int] | None) -> str:
    """Return the chosen experts, each with its number of tokens (rows), as text; empty for None."""
    return ", ".join(f"E{expert}: {rows}" for expert, rows in sorted((experts or {}).items()))


def _tasks(columns: Columns, tasks: Sequence[TaskInfo]) -> dict[str, Any]:
    """Add columns with an item for each task description, and return the JSON value that refers to the columns."""
    verbs, resources = _Numbered[str](), _Numbered[str]()
    return {
        "label": [each.label for each in tasks],
        "verb": columns.add("u16", (verbs.of(each.verb) for each in tasks)),
        "resource": columns.add("u16", (resources.of(each.resource) for each in tasks)),
        "family": columns.add("u8", (FAMILIES.index(family_of(each)) for each in tasks)),
        "layer": columns.add("i32", (each.layer for each in tasks)),
        "micro_batch": columns.add("i32", (each.micro_batch for each in tasks)),
        "expert": columns.add("i32", (each.expert for each in tasks)),
        "pages": columns.add("u32", (each.pages for each in tasks)),
        "page_names": [each.page_names for each in tasks],
        "rows": columns.add("u32", (each.rows for each in tasks)),
        "flops": columns.add("f64", (each.flops for each in tasks)),
        "bytes": columns.add("f64", (each.nbytes for each in tasks)),
        "verbs": verbs.values,
        "resources": resources.values,
    }


def _edges(columns: Columns, recording: Recording) -> dict[str, Any]:
    """Add columns with the tasks that each task depends on, and return the JSON value that refers to the columns.

    Column `count` has an item for each task: the number of tasks that it depends on. Column `back` has an item for each
    dependency: the number of positions in the run's list from the earlier task to the task that depends on it. Such
    numbers are small, and compress well.
    """
    back = (index - producer for index, producers in enumerate(recording.producers) for producer in producers)
    return {
        "edges": {
            "count": columns.add("u32", map(len, recording.producers)),
            "back": columns.add("i32", back),
        }
    }


def _waits(columns: Columns, recording: Recording) -> dict[str, Any]:
    """Add columns with the last thing that each task waited for, and return the JSON value that refers to them.

    There is a column for each field of `Wait`; the column of `why` (the reason) has positions in `WHY`.
    """
    waits = waits_of(recording)
    return {
        "waits": {
            "before": columns.add("i32", (wait.waited_for for wait in waits)),
            "why": columns.add("u8", (WHY.index(wait.why) for wait in waits)),
            "policy": columns.add("f64", (wait.policy for wait in waits)),
            "host": columns.add("f64", (wait.host for wait in waits)),
        },
        "whys": WHY,
    }


def _memory(columns: Columns, recording: Recording) -> list[dict[str, Any]]:
    by_memory: dict[tuple[int, str], list[MemorySample]] = {}
    for sample in recording.memory:
        by_memory.setdefault((sample.rank, sample.memory), []).append(sample)
    return [
        {
            "rank": rank,
            "name": memory,
            "time": columns.add("f64", (each.time for each in samples)),
            "reserved": columns.add("f64", (each.reserved for each in samples)),
            "pages": columns.add("f64", (each.pages for each in samples)),
        }
        for (rank, memory), samples in by_memory.items()
        if any(each.reserved or each.pages for each in samples)
    ]


def _pools(columns: Columns, recording: Recording) -> list[dict[str, Any]]:
    by_pool: dict[tuple[int, str], list[PoolSample]] = {}
    for sample in recording.pools:
        by_pool.setdefault((sample.rank, sample.pool), []).append(sample)
    return [
        {
            "rank": rank,
            "name": pool,
            "time": columns.add("f64", (each.time for each in samples)),
            "hits": columns.add("f64", (each.counted.hits for each in samples)),
            "misses": columns.add("f64", (each.counted.misses for each in samples)),
            "wasted": columns.add("f64", (each.counted.wasted for each in samples)),
        }
        for (rank, pool), samples in by_pool.items()
        if any(any(each.counted) for each in samples)
    ]
