"""The time of each lane: busy, alone or beside others, and idle with its causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest

import msgspec

from moesched.analysis.idle_spans import Cause, IdleSpan, idle_spans
from moesched.trace.recording import LaneName, Recording, Slice
from moesched.trace.waits import Wait

LONGEST_SPANS = 5
"""Idle spans of a lane that are listed."""


class CauseTime(msgspec.Struct, frozen=True, kw_only=True):
    """Idle time with one cause.

    Attributes:
        kind, lane: of the tasks that ran meanwhile; for "policy" and "host", of those that started afterwards.
    """

    cause: Cause
    kind: str
    lane: str
    seconds: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An idle span.

    Attributes:
        start: seconds since the start of the recording.
        cause: of its longest part.
        waited_for: the task that had to end first; empty if there is none.
        before: the task that ended the span.
    """

    start: float
    seconds: float
    cause: Cause
    waited_for: str
    before: str


class LaneTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a lane.

    Attributes:
        alone_seconds: busy while no other lane was.
        causes: of the idle time, largest first; they add up to it.
        longest: idle spans, the longest first, without the one after its last task.
    """

    tasks: int
    busy_seconds: float
    idle_seconds: float
    alone_seconds: float
    causes: list[CauseTime]
    longest: list[Span]


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Time by the number of lanes that were busy.

    Attributes:
        nanoseconds: by the number of lanes that were busy.
        alone: nanoseconds in which a lane was the only busy one.
    """

    nanoseconds: list[int]
    alone: dict[LaneName, int]

    @property
    def overlap(self) -> float:
        """The mean number of busy lanes while there was one; 0 if there never was."""
        some = sum(self.nanoseconds[1:])
        return sum(count * spent for count, spent in enumerate(self.nanoseconds)) / some if some else 0.0


def together(recording: Recording) -> Together:
    """Measure how many lanes were busy at a time, and which was alone."""
    numbers = {lane: number for number, lane in enumerate(recording.lanes)}
    changes = [(each.start, 1, numbers[each.lane]) for each in recording.slices]
    changes += [(each.end, -1, numbers[each.lane]) for each in recording.slices]
    changes.sort()
    spent = [0] * (1 + len(numbers))
    alone = [0] * len(numbers)
    busy = [0] * len(numbers)
    count, total, since = 0, 0, recording.start
    for time, change, number in changes:
        spent[count] += time - since
        if count == 1:
            alone[total] += time - since
        since = time
        busy[number] += change
        # A task without length is drawn one nanosecond long, and may overlap the next one on its lane.
        if busy[number] == (change > 0):
            count += change
            total += change * number
    return Together(nanoseconds=spent, alone=dict(zip(numbers, alone, strict=True)))


def lane_times(
    recording: Recording, waits: Sequence[Wait], alone: Mapping[LaneName, int]
) -> dict[str, LaneTime]:
    """Return the time of each lane, by its title."""
    spans = idle_spans(recording, waits)
    busy = dict.fromkeys(recording.lanes, 0)
    tasks = dict.fromkeys(recording.lanes, 0)
    for each in recording.slices:
        busy[each.lane] += each.end - each.start
        tasks[each.lane] += 1
    return {
        title: LaneTime(
            tasks=tasks[lane],
            busy_seconds=busy[lane] / 1e9,
            idle_seconds=sum(span.end - span.start for span in spans[lane]) / 1e9,
            alone_seconds=alone[lane] / 1e9,
            causes=_causes(recording, spans[lane]),
            longest=_longest(recording, spans[lane]),
        )
        for lane, title in recording.titles.items()
    }


def _causes(recording: Recording, spans: Sequence[IdleSpan]) -> list[CauseTime]:
    titles = recording.titles
    spent: Counter[tuple[Cause, str, str]] = Counter()
    for span in spans:
        for cause, index, nanoseconds in span.parts:
            kind, lane = "", ""
            if index >= 0:
                each = recording.slices[index]
                kind, lane = each.task.verb, titles[each.lane]
            spent[cause, kind, lane] += nanoseconds
    return [
        CauseTime(cause=cause, kind=kind, lane=lane, seconds=nanoseconds / 1e9)
        for (cause, kind, lane), nanoseconds in spent.most_common()
    ]


def _longest(recording: Recording, spans: Sequence[IdleSpan]) -> list[Span]:
    slices = recording.slices
    waited = [span for span in spans if span.before >= 0]
    found = []
    for span in nlargest(LONGEST_SPANS, waited, key=lambda span: span.end - span.start):
        found.append(
            Span(
                start=span.start / 1e9,
                seconds=(span.end - span.start) / 1e9,
                cause=span.main.cause,
                waited_for=_label(slices[span.waited_for]) if span.waited_for >= 0 else "",
                before=_label(slices[span.before]),
            )
        )
    return found


def _label(each: Slice) -> str:
    return f"{each.task.label}, step {each.step}"
