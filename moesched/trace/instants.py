"""Lengthens tasks that took no time to one nanosecond, since viewers draw no arrows at tasks without length."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.trace.recording import LaneName, Slice


def lengthen(slices: Sequence[Slice], producers: Sequence[Sequence[int]]) -> None:
    """Make tasks of zero length one nanosecond long, and delay tasks that would then begin before these tasks end.

    Faults of the clock stay visible to checks: tasks that overlapped before, or began before the end of a task that
    they depend on, still do.

    Args:
        slices: the tasks that ran on all lanes, in any order; changed in place.
        producers: for each task, the indices of the tasks that it depends on.
    """
    if all(each.start < each.end for each in slices):
        return
    ends = [each.end for each in slices]
    last: dict[LaneName, int] = {}
    for place in sorted(range(len(slices)), key=lambda place: _in_time(slices[place])):
        each = slices[place]
        before = [*producers[place], *([last[each.lane]] if each.lane in last else [])]
        each.start = max([each.start, *(slices[other].end for other in before if ends[other] <= each.start)])
        each.end = max(each.end, each.start + 1)
        last[each.lane] = place


def _in_time(each: Slice) -> tuple[int, int, int]:
    """Return a task's sort key: start, end and number, so that tasks with equal times stay in program order."""
    return each.start, each.end, each.id
