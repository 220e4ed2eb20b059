"""Sums the time of the critical path by kind of task, lane and cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

import msgspec

from moesched.analysis.idle_spans import Cause, cause_of
from moesched.analysis.returning_pages import Key, key_of
from moesched.trace.critical import critical_path
from moesched.trace.recording import Recording
from moesched.trace.waits import Wait

BETWEEN: tuple[Cause, ...] = ("policy", "host")
"""Causes of the time on the critical path in which no task of the path ran."""


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the critical path: all tasks, or all times between tasks, that have the same kind, lane and cause.

    Attributes:
        kind: the verb of these tasks; "policy" or "host" for the time between tasks.
        lane: title of the lane on which the tasks ran; for time between tasks, the lane of the task that follows.
        cause: the reason why the next task of the path waited for these tasks; `kind` again for time between tasks.
        tasks: number of these tasks, or of the times between tasks.
        seconds: total of these times.
        share: `seconds` over the time of the run.
    """

    kind: str
    lane: str
    cause: Cause
    tasks: int
    seconds: float
    share: float


class Stretch(NamedTuple):
    """One task on the critical path, or the time between two tasks; see `PathPart` for `kind`, `lane` and `cause`.

    `line` is the line of the policy that submitted the task, as file:line.
    """

    kind: str
    lane: str
    cause: Cause
    line: str
    nanoseconds: int


def stretches_of(
    recording: Recording, waits: Sequence[Wait], returning: Set[Key] = frozenset()
) -> Iterator[Stretch]:
    """Yield the stretches of the critical path, in order of time.

    Args:
        waits: the last wait of each task.
        returning: keys (rank, task id) of fetches that a larger pool would not need; their cause becomes "budget".
    """
    titles = recording.titles
    path = critical_path(recording, waits)
    reached: list[Cause] = [cause_of(hop.slice, after.wait.why) for hop, after in pairwise(path)]
    free = recording.start
    for hop, waited in zip(path, [*reached, "data"], strict=True):
        each, lane = hop.slice, titles[hop.slice.lane]
        cause: Cause = "budget" if key_of(each) in returning else waited
        for between, spent in zip(BETWEEN, (hop.wait.policy, hop.wait.host), strict=True):
            if spent:
                yield Stretch(between, lane, between, each.line, spent)
        # Parts of a collective on two ranks overlap if one started late.
        if each.end > max(free, each.start):
            yield Stretch(each.task.verb, lane, cause, each.line, each.end - max(free, each.start))
        free = max(free, each.end)


def path_parts(stretches: Sequence[Stretch], total: int) -> list[PathPart]:
    """Sum stretches of the critical path by kind, lane and cause; the part with the most time comes first.

    Args:
        total: nanoseconds of the run.
    """
    spent: Counter[tuple[str, str, Cause]] = Counter()
    tasks: Counter[tuple[str, str, Cause]] = Counter()
    for kind, lane, cause, _, nanoseconds in stretches:
        spent[kind, lane, cause] += nanoseconds
        tasks[kind, lane, cause] += 1
    return [
        PathPart(
            kind=kind,
            lane=lane,
            cause=cause,
            tasks=tasks[kind, lane, cause],
            seconds=nanoseconds / 1e9,
            share=share_of(nanoseconds, total),
        )
        for (kind, lane, cause), nanoseconds in spent.most_common()
    ]


def share_of(nanoseconds: int, total: int) -> float:
    """Return nanoseconds / total; 0.0 if the total is 0."""
    return nanoseconds / total if total else 0.0
