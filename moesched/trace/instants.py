"""Lengthening of tasks that took no time to a nanosecond, since viewers lose the arrows of a slice without length."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.trace.recording import LaneName, Slice


def lengthen(slices: Sequence[Slice], producers: Sequence[Sequence[int]]) -> None:
    """Make slices of zero length a nanosecond long, and move slices that begin where these end.

    Slices that overlap, or that begin before the end of those they depend on, still do, so that checks find faults of
    a clock.

    Args:
        slices: slices of all lanes, in any order; changed in place.
        producers: for each slice, the indices of the slices that it depends on.
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
    """The sort key of a slice: start, end, then program order, in which slices follow those they depend on."""
    return each.start, each.end, each.id
