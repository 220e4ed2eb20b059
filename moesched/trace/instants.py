"""Gives a nanosecond to each task that took none, since viewers lose the arrows of a slice without length."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.trace.recording import LaneName, Slice


def lengthen(slices: Sequence[Slice], producers: Sequence[Sequence[int]]) -> None:
    """Make slices a nanosecond long or longer, and begin those later that began where such a one ended.

    A slice that begins before one ends that it should follow still does: that is the clock's fault, which checks find.

    Args:
        slices: those on one lane do not overlap.
        producers: of each slice, the indices of those that it depends on.
    """
    if all(each.start < each.end for each in slices):
        return
    ends = [each.end for each in slices]
    last: dict[LaneName, int] = {}
    for place in sorted(
        range(len(slices)), key=lambda place: (slices[place].start, slices[place].end, slices[place].id)
    ):
        each = slices[place]
        before = [*producers[place], *([last[each.lane]] if each.lane in last else [])]
        each.start = max([each.start, *(slices[other].end for other in before if ends[other] <= each.start)])
        each.end = max(each.end, each.start + 1)
        last[each.lane] = place
