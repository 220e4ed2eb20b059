"""The critical path: the chain of tasks that determined the end of a run; and the least time that the tasks need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from moesched.trace.recording import LaneName, Recording, Slice

Why = Literal["start", "data", "lane", "rank"]


class Hop(NamedTuple):
    """One task of the critical path.

    Attributes:
        why: its last wait for the previous hop: an edge from it ("data"), its lane being occupied by it ("lane"), or
            another rank's part of a collective, which waited for it ("rank"); "start" for the first hop.
        gap: nanoseconds from the end of the previous hop (or the start of the recording) to its own start, spent in
            the policy or the driver.
    """

    slice: Slice
    why: Why
    gap: int


def critical_path(recording: Recording) -> list[Hop]:
    """Follow the predecessors that ended last, from the task that ended last; returned in order of time."""
    slices = recording.slices
    if not slices:
        return []
    before = _before_on_lane(recording)
    parts = _collectives(recording)
    hops: list[Hop] = []
    index = max(range(len(slices)), key=lambda each: (slices[each].end, each))
    while True:
        latest = -1
        why: Why = "start"
        for candidate, reason in _predecessors(recording, index, before, parts):
            # Indices only decrease on the way back, so the walk ends even if clocks were wrong.
            if candidate < index and (latest < 0 or slices[candidate].end > slices[latest].end):
                latest, why = candidate, reason
        since = slices[latest].end if latest >= 0 else recording.start
        hops.append(Hop(slices[index], why, slices[index].start - since))
        if latest < 0:
            return hops[::-1]
        index = latest


def least_nanoseconds(recording: Recording, start: int, end: int) -> int:
    """The time that the work between two times would take in the best order: the same tasks on the same lanes.

    That is the busy time of the busiest lane, or the longest chain of tasks of which each waits for the one before,
    whichever is longer. Tasks count with the part of them that lies between the times.
    """
    busy = dict.fromkeys(recording.lanes, 0)
    chains: list[int] = []
    for each, producers in zip(recording.slices, recording.producers, strict=True):
        spent = max(0, min(each.end, end) - max(each.start, start))
        busy[each.lane] += spent
        chains.append(spent + max((chains[producer] for producer in producers), default=0))
    return max(*busy.values(), *chains, 0)


def _predecessors(
    recording: Recording, index: int, before: list[int], parts: dict[int, list[int]]
) -> Iterator[tuple[int, Why]]:
    """Yield the slices that a slice waited for; data first, so that it is preferred if lane and data end together."""
    for producer in recording.producers[index]:
        yield producer, "data"
    if before[index] >= 0:
        yield before[index], "lane"
    ticket = recording.slices[index].ticket
    for other in parts.get(ticket, ()) if ticket >= 0 else ():
        if other != index:
            for producer in (*recording.producers[other], before[other]):
                if producer >= 0:
                    yield producer, "rank"


def _before_on_lane(recording: Recording) -> list[int]:
    last: dict[LaneName, int] = {}
    before = []
    for index, each in enumerate(recording.slices):
        before.append(last.get(each.lane, -1))
        last[each.lane] = index
    return before


def _collectives(recording: Recording) -> dict[int, list[int]]:
    parts: dict[int, list[int]] = {}
    for index, each in enumerate(recording.slices):
        if each.ticket >= 0:
            parts.setdefault(each.ticket, []).append(index)
    return parts
