"""Finds the spans in which lanes are idle, and the causes.

A span ends when its lane's next task starts. From this task a chain of tasks leads back in time: before each task in
the chain comes the one that it waited for last. Every nanosecond of the span belongs to a task of the chain, or to the
time between two tasks of the chain, in which the policy or the driver ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from moesched.trace.recording import LaneName, Recording, Slice
from moesched.trace.waits import Wait, Why

Cause = Literal["data", "lane", "budget", "router", "rank", "policy", "host", "finished"]
"""The reason why a lane is idle, or why a task of the critical path waits.

"data": a task computed or moved what the next one reads. "lane": another task of the same lane ran. "budget": the
weights that the next task overwrites were still in use. "router": the policy awaited a router's choice. "rank": another
rank had not come to a collective. "policy": the policy's own Python ran. "host": the driver ran, or a thread woke up.
"finished": the lane had no further task.
"""

ROUTERS = ("route", "preview_route")
"""Verbs whose result a policy awaits to choose experts."""

LASTING: tuple[Cause, ...] = ("budget", "router", "rank")
"""Causes that count for a lane's whole wait, whatever ran meanwhile elsewhere."""

_CAUSES: dict[Why, Cause] = {
    "data": "data",
    "lane": "lane",
    "room": "budget",
    "rank": "rank",
    "await": "data",
}


class IdlePart(NamedTuple):
    """A part of an idle span, with its cause.

    Attributes:
        task: index of a task in `recording.slices`. The task ran during the part or, with the cause "policy" or
            "host", started after it. -1 with the cause "finished".
    """

    cause: Cause
    task: int
    nanoseconds: int


class IdleSpan(NamedTuple):
    """A span in which a lane was idle; `start` and `end` are nanoseconds since the start of the run.

    Attributes:
        before: index of the task that started at the end of the span; -1 if the lane had no further task.
        waited_for: index of the task that `before` waited for last; -1 if there is none.
        parts: the parts that make up the span, latest first.
    """

    start: int
    end: int
    before: int
    waited_for: int
    parts: list[IdlePart]

    @property
    def main(self) -> IdlePart:
        """The longest part of the span."""
        return max(self.parts, key=lambda part: part.nanoseconds)


def idle_spans(recording: Recording, waits: Sequence[Wait]) -> dict[LaneName, list[IdleSpan]]:
    """Return the idle spans of each lane, in order of time; `waits` tells what each recorded task waited for last."""
    spans: dict[LaneName, list[IdleSpan]] = {lane: [] for lane in recording.lanes}
    free = dict.fromkeys(recording.lanes, recording.start)
    for index, each in enumerate(recording.slices):
        since = free[each.lane]
        if each.start > since:
            parts = list(_parts(recording, waits, index, since))
            spans[each.lane].append(IdleSpan(since, each.start, index, waits[index].waited_for, parts))
        free[each.lane] = max(since, each.end)
    end = recording.end
    for lane, since in free.items():
        if end > since:
            spans[lane].append(IdleSpan(since, end, -1, -1, [IdlePart("finished", -1, end - since)]))
    return spans


def cause_of(before: Slice, why: Why) -> Cause:
    """Classify a lane's idle time while its next task waits for another task.

    Args:
        before: the task that is waited for.
        why: the kind of the wait, as in `Wait.why`.
    """
    return "router" if why == "await" and before.task.verb in ROUTERS else _CAUSES[why]


def _parts(recording: Recording, waits: Sequence[Wait], index: int, since: int) -> Iterator[IdlePart]:
    """Yield the parts of a lane's idle span, latest first; the span ends at the start of the task at `index`.

    Args:
        since: start of the span, in nanoseconds.
    """
    slices = recording.slices
    until = slices[index].start
    first = waits[index].waited_for
    lasting: Cause | None = None
    while until > since:
        wait = waits[index]
        between: tuple[tuple[Cause, int], ...] = (("host", wait.host), ("policy", wait.policy))
        for cause, nanoseconds in between:
            spent = min(nanoseconds, until - since)
            if spent > 0:
                yield IdlePart(cause, index, spent)
                until -= spent
        if wait.waited_for < 0:
            return
        before = slices[wait.waited_for]
        cause = lasting or cause_of(before, wait.why)
        if wait.waited_for == first and cause in LASTING:
            lasting = cause
        begun = max(before.start, since)
        if begun < until:
            yield IdlePart(cause, wait.waited_for, until - begun)
            until = begun
        index = wait.waited_for
