"""The time of the critical path, by what it passed with, and the bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec

from moesched.analysis.idle_spans import Cause, cause_of
from moesched.trace.critical import critical_path
from moesched.trace.recording import Recording
from moesched.trace.summary import lane_title
from moesched.trace.waits import Wait

BETWEEN: tuple[Cause, ...] = ("policy", "host")
"""Causes of time in which no task of the path ran."""

OF_A_LANE: tuple[Cause, ...] = ("data", "lane")
"""Causes for which the lane is to blame that the tasks of the path ran on."""


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the critical path.

    Attributes:
        kind: of the tasks that ran; "policy" or "host" for the time between tasks.
        lane: where they ran, or where the next task started.
        cause: why the next task waited for them.
        tasks: number of them, or of the stretches between tasks.
        share: of the time of the run.
    """

    kind: str
    lane: str
    cause: Cause
    tasks: int
    seconds: float
    share: float


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """The largest part of the critical path: the tasks of one lane, or one cause of waiting.

    Attributes:
        lane: the lane that is too slow, or that waits for the policy, the driver, another rank, room, or a router.
        kind: the kind of task that takes most of it; "policy" or "host" for the time between tasks.
        line: the policy's line that submitted most of these tasks, as file:line; empty if none is known.
        share: of the time of the run.
    """

    lane: str
    kind: str
    cause: Cause
    line: str
    seconds: float
    share: float


class Stretch(NamedTuple):
    """A stretch of the critical path; see `PathPart`."""

    kind: str
    lane: str
    cause: Cause
    line: str
    nanoseconds: int


def stretches_of(recording: Recording, waits: Sequence[Wait]) -> Iterator[Stretch]:
    """Yield the stretches of the critical path, in order of time."""
    ranks = len({lane.rank for lane in recording.lanes})
    path = critical_path(recording, waits)
    reached: list[Cause] = [cause_of(hop.slice, after.wait.why) for hop, after in pairwise(path)]
    free = recording.start
    for hop, cause in zip(path, [*reached, "data"], strict=True):
        each, lane = hop.slice, lane_title(hop.slice.lane, ranks)
        for between, spent in zip(BETWEEN, (hop.wait.policy, hop.wait.host), strict=True):
            if spent:
                yield Stretch(between, lane, between, each.line, spent)
        # Parts of a collective on two ranks overlap if one started late.
        if each.end > max(free, each.start):
            yield Stretch(each.task.verb, lane, cause, each.line, each.end - max(free, each.start))
        free = max(free, each.end)


def path_parts(stretches: Sequence[Stretch], seconds: float) -> list[PathPart]:
    """The stretches by kind, lane and cause, longest first."""
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
            share=_share(nanoseconds, seconds),
        )
        for (kind, lane, cause), nanoseconds in spent.most_common()
    ]


def bottleneck(stretches: Sequence[Stretch], seconds: float) -> Bottleneck | None:
    """The lane whose tasks take most of the path, or the cause that does; None if there are no tasks."""
    groups: dict[tuple[str, str], list[Stretch]] = {}
    for each in stretches:
        group = (each.lane, "") if each.cause in OF_A_LANE else ("", each.cause)
        groups.setdefault(group, []).append(each)
    if not groups:
        return None
    largest = max(groups.values(), key=_nanoseconds)
    return Bottleneck(
        lane=_most(largest, "lane"),
        kind=_most(largest, "kind"),
        cause=_most(largest, "cause"),
        line=_most(largest, "line"),
        seconds=_nanoseconds(largest) / 1e9,
        share=_share(_nanoseconds(largest), seconds),
    )


def _nanoseconds(stretches: Sequence[Stretch]) -> int:
    return sum(each.nanoseconds for each in stretches)


def _most(stretches: Sequence[Stretch], field: Literal["lane", "kind", "cause", "line"]) -> Any:
    """The value of a field that most of the time has."""
    spent: Counter[str] = Counter()
    for each in stretches:
        spent[getattr(each, field)] += each.nanoseconds
    return spent.most_common(1)[0][0]


def _share(nanoseconds: int, seconds: float) -> float:
    return nanoseconds / 1e9 / seconds if seconds else 0.0
