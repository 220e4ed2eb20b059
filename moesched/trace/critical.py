"""Finds the critical path (the chain of tasks that determined a run's end), and the least time of a run's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesched.trace.recording import Recording, Slice
from moesched.trace.waits import Wait, waits_of


class Hop(NamedTuple):
    """One task of the critical path, and the task's wait for the previous task of the path."""

    slice: Slice
    wait: Wait

    @property
    def gap(self) -> int:
        """Nanoseconds from the previous task's end to this task's start, in which the policy or the driver ran."""
        return self.wait.policy + self.wait.host


def critical_path(recording: Recording, waits: Sequence[Wait] | None = None) -> list[Hop]:
    """Return the chain of tasks that ends with the last task of the run; each task waited for the one before it.

    Args:
        waits: the result of `waits_of` for the recording; None to compute it.
    """
    slices = recording.slices
    if not slices:
        return []
    waits = waits_of(recording) if waits is None else waits
    hops: list[Hop] = []
    index = max(range(len(slices)), key=lambda each: (slices[each].end, each))
    while index >= 0:
        hops.append(Hop(slices[index], waits[index]))
        index = waits[index].waited_for
    return hops[::-1]


def least_nanoseconds(recording: Recording, start: int, end: int) -> int:
    """Return a lower bound, in nanoseconds, of the time that the tasks need on their lanes in any order.

    The bound is the larger of two: the busy time of the busiest lane, and the longest chain of tasks of which each
    depends on the one before. Of each task, only the part between `start` and `end` (nanoseconds of the recording)
    counts.
    """
    busy = dict.fromkeys(recording.lanes, 0)
    chains: list[int] = []
    for each, producers in zip(recording.slices, recording.producers, strict=True):
        spent = max(0, min(each.end, end) - max(each.start, start))
        busy[each.lane] += spent
        chains.append(spent + max((chains[producer] for producer in producers), default=0))
    return max(max(busy.values(), default=0), max(chains, default=0))
