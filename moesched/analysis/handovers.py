"""Computes the mean times between tasks of a measured run: to wake the thread of a lane, and the policy's own time.

Both times are recorded for each task. A replay uses their means by kind of task, a few dozen figures per run. With each
task's own times, a replay would merely reproduce the recorded starts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from statistics import fmean
from typing import NamedTuple

from moesched.trace.recording import LaneName, Recording


class Handover(NamedTuple):
    """Times that pass before a task starts, in nanoseconds.

    Attributes:
        submit_delay: time that the policy takes to submit the task while its lane is idle; 0 if the lane is busy.
        dispatch: time that the lane takes to start the task.
    """

    submit_delay: int = 0
    dispatch: int = 0


def mean_handovers(recording: Recording) -> list[Handover]:
    """Return for each recorded task the mean times before tasks of its kind; 0 if none were recorded."""
    submit_delays = _means(_submit_delays(recording))
    dispatches = _means(_dispatches(recording))
    return [
        Handover(submit_delays.get(index, 0), dispatches.get(index, 0))
        for index in range(len(recording.slices))
    ]


def awaits_in_order(recording: Recording, rank: int) -> list[tuple[int, int]]:
    """Return the tasks that a rank's policy awaited, in order.

    Returns:
        Pairs (number of tasks that were submitted by then, index of the awaited task in `recording.slices`).
    """
    return sorted(
        (each.awaited_at, index)
        for index, each in enumerate(recording.slices)
        if each.lane.rank == rank and each.awaited_at >= 0
    )


_Measured = Iterator[tuple[int, Hashable, int]]
"""Measured overheads, as tuples (index of the task, kind, nanoseconds)."""


def _means(measured: _Measured) -> Mapping[int, int]:
    """Return, by the index of each task, the mean nanoseconds over the tasks of its kind.

    Args:
        measured: tuples (index of the task, kind, nanoseconds).
    """
    kinds: dict[Hashable, list[tuple[int, int]]] = {}
    for index, kind, nanoseconds in measured:
        kinds.setdefault(kind, []).append((index, nanoseconds))
    means: dict[int, int] = {}
    for group in kinds.values():
        mean = round(fmean(nanoseconds for _, nanoseconds in group))
        means |= {index: mean for index, _ in group}
    return means


def _submit_delays(recording: Recording) -> _Measured:
    """Yield each task's submit delay as (index of the task, kind, nanoseconds).

    A kind is (rank, verb, whether the policy had just awaited a task). The first delay of each rank is left out.
    """
    slices = recording.slices
    for rank in {lane.rank for lane in recording.lanes}:
        awaits = iter(awaits_in_order(recording, rank))
        following = next(awaits, None)
        woken, first = False, True
        for number, index in sorted((each.id, n) for n, each in enumerate(slices) if each.lane.rank == rank):
            while following is not None and following[0] <= number:
                woken, following = True, next(awaits, None)
            if slices[index].submit_delay >= 0:
                if not first:
                    yield index, (rank, slices[index].task.verb, woken), slices[index].submit_delay
                woken = first = False


def _dispatches(recording: Recording) -> _Measured:
    """Yield each task's dispatch time as (index of the task, kind, nanoseconds).

    A kind is the pair of the lane and the word for what the task waited for: "policy", "lane" or "task".
    """
    ends: dict[LaneName, int] = {}
    for index, each in enumerate(recording.slices):
        after_lane = each.start - each.dispatch == ends.get(each.lane)
        cause = "policy" if each.submit_delay >= 0 else "lane" if after_lane else "task"
        ends[each.lane] = each.end
        if each.dispatch > 0:
            yield index, (each.lane, cause), each.dispatch
