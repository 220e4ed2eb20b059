"""Sums the time of each lane: busy, alone or beside other lanes, and idle by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest

import msgspec

from moesched.analysis.idle_spans import Cause, IdleSpan, idle_spans
from moesched.trace.recording import LaneName, Recording, Slice
from moesched.trace.waits import Wait

LONGEST_SPANS = 5
"""Largest number of idle spans that are listed for a lane."""


class CauseTime(msgspec.Struct, frozen=True, kw_only=True):
    """Idle seconds of a lane that have one cause, and are due to tasks of one verb on one lane.

    Attributes:
        kind, lane: verb of these tasks, and title of the lane on which they ran. They ran during the idle seconds or,
            if the cause is "policy" or "host", started after them. Both texts are empty if the cause is "finished".
        seconds: sum of the idle seconds.
    """

    cause: Cause
    kind: str
    lane: str
    seconds: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An idle span of a lane.

    Attributes:
        start: seconds since the start of the recording.
        cause: cause of the span's longest part.
        waited_for: label and step of the task that had to end before the next one could start; empty if there is none.
        before: label and step of the task that started at the end of the span.
    """

    start: float
    seconds: float
    cause: Cause
    waited_for: str
    before: str


class LaneTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a lane.

    Attributes:
        alone_seconds: time in which this lane was busy and no other was.
        launching_seconds: busy time in which the host was still launching kernels of the running task; 0 unless the
            lane is a GPU stream.
        causes: idle time by cause, largest first; the causes add up to all idle time.
        longest: the longest idle spans, longest first, without the span after the lane's last task.
    """

    tasks: int
    busy_seconds: float
    idle_seconds: float
    alone_seconds: float
    launching_seconds: float
    causes: list[CauseTime]
    longest: list[Span]


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a recording, by the number of lanes that were busy at once.

    Attributes:
        nanoseconds: at index N, the nanoseconds in which exactly N lanes were busy.
        alone: maps a lane to the nanoseconds in which it was the only busy lane.
    """

    nanoseconds: list[int]
    alone: dict[LaneName, int]

    @property
    def overlap(self) -> float:
        """The mean number of busy lanes over the time in which at least one was busy; 0 if none ever was."""
        some = sum(self.nanoseconds[1:])
        return sum(count * spent for count, spent in enumerate(self.nanoseconds)) / some if some else 0.0


def together(recording: Recording) -> Together:
    """Sum the time of a recording by the number of busy lanes, and the time in which each lane was busy alone."""
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
    """Return the busy and idle time of each lane, by the lane's title.

    Args:
        waits: for each recorded task, the task that it waited for last, and the reason.
        alone: nanoseconds in which each lane was the only busy one.
    """
    spans = idle_spans(recording, waits)
    busy = dict.fromkeys(recording.lanes, 0)
    launching = dict.fromkeys(recording.lanes, 0)
    tasks = dict.fromkeys(recording.lanes, 0)
    for each in recording.slices:
        busy[each.lane] += each.end - each.start
        launching[each.lane] += each.launching
        tasks[each.lane] += 1
    return {
        title: LaneTime(
            tasks=tasks[lane],
            busy_seconds=busy[lane] / 1e9,
            idle_seconds=sum(span.end - span.start for span in spans[lane]) / 1e9,
            alone_seconds=alone[lane] / 1e9,
            launching_seconds=launching[lane] / 1e9,
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
