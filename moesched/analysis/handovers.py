"""What passes between the tasks of a measured run: waking the thread of a lane, and the policy's own time.

Both were recorded of each task. What counts here is their mean over all handovers of a kind in the run, a few dozen
figures in all: a task's own time from the end of one task to the start of the next would be its start time again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from statistics import fmean
from typing import NamedTuple

from moesched.trace.recording import LaneName, Recording


class Handover(NamedTuple):
    """What comes before a task; nanoseconds.

    Attributes:
        thought: what its policy takes to submit it while its lane is idle for it; 0 where no lane is.
        dispatch: what its lane takes to start it.
    """

    thought: int = 0
    dispatch: int = 0


def mean_handovers(recording: Recording) -> list[Handover]:
    """The handover of each slice: the means of its kinds. All are 0 where none was recorded, as of a prediction."""
    submit_delays = _means(_thoughts(recording))
    dispatches = _means(_dispatches(recording))
    return [
        Handover(submit_delays.get(index, 0), dispatches.get(index, 0))
        for index in range(len(recording.slices))
    ]


def awaits_in_order(recording: Recording, rank: int) -> list[tuple[int, int]]:
    """What a rank's policy awaited, as (tasks that had been submitted by then, slice), earliest first."""
    return sorted(
        (each.awaited_at, index)
        for index, each in enumerate(recording.slices)
        if each.lane.rank == rank and each.awaited_at >= 0
    )


_Measured = Iterator[tuple[int, Hashable, int]]
"""Index of the slice, kind, nanoseconds."""


def _means(measured: _Measured) -> Mapping[int, int]:
    """The mean of its kind, by slice."""
    kinds: dict[Hashable, list[tuple[int, int]]] = {}
    for index, kind, nanoseconds in measured:
        kinds.setdefault(kind, []).append((index, nanoseconds))
    return {
        index: round(fmean(nanoseconds for _, nanoseconds in group))
        for group in kinds.values()
        for index, _ in group
    }


def _thoughts(recording: Recording) -> _Measured:
    """By verb, and by whether the policy had to be woken first. A rank's first one lies before the run."""
    slices = recording.slices
    for rank in {lane.rank for lane in recording.lanes}:
        awaits = iter(awaits_in_order(recording, rank))
        following = next(awaits, None)
        woken, first = False, True
        for number, index in sorted((each.id, n) for n, each in enumerate(slices) if each.lane.rank == rank):
            while following is not None and following[0] <= number:
                woken, following = True, next(awaits, None)
            if slices[index].thought >= 0:
                if not first:
                    yield index, (rank, slices[index].verb, woken), slices[index].thought
                woken = first = False


def _dispatches(recording: Recording) -> _Measured:
    """By lane, and by what let the task start: the task before it on the lane, another one, or the policy."""
    ends: dict[LaneName, int] = {}
    for index, each in enumerate(recording.slices):
        after_lane = each.start - each.dispatch == ends.get(each.lane)
        cause = "policy" if each.thought >= 0 else "lane" if after_lane else "task"
        ends[each.lane] = each.end
        if each.dispatch > 0:
            yield index, (each.lane, cause), each.dispatch
