"""The critical path: the chain of tasks that determined the end of a run; and the least time that the tasks need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesched.trace.recording import Recording, Slice
from moesched.trace.waits import Wait, waits_of


class Hop(NamedTuple):
    """One task of the critical path, and its wait for the previous one."""

    slice: Slice
    wait: Wait

    @property
    def gap(self) -> int:
        """Nanoseconds since the end of the previous hop, spent in the policy or the driver."""
        return self.wait.policy + self.wait.host


def critical_path(recording: Recording, waits: Sequence[Wait] | None = None) -> list[Hop]:
    """Return the chain of tasks, each of which waited for the one before, up to the task that ended last.

    Args:
        waits: the waits of the recording (`waits_of`), if they are known.
    """
    slices = recording.slices
    if not slices:
        return []
    waits = waits_of(recording) if waits is None else waits
    hops: list[Hop] = []
    index = max(range(len(slices)), key=lambda each: (slices[each].end, each))
    while index >= 0:
        hops.append(Hop(slices[index], waits[index]))
        index = waits[index].before
    return hops[::-1]


def least_nanoseconds(recording: Recording, start: int, end: int) -> int:
    """Return the least nanoseconds that the tasks between two times need on the same lanes, in any order.

    That is the busy time of the busiest lane, or the longest chain of tasks of which each depends on the one before,
    whichever is longer. Of each task, the part between the times counts.
    """
    busy = dict.fromkeys(recording.lanes, 0)
    chains: list[int] = []
    for each, producers in zip(recording.slices, recording.producers, strict=True):
        spent = max(0, min(each.end, end) - max(each.start, start))
        busy[each.lane] += spent
        chains.append(spent + max((chains[producer] for producer in producers), default=0))
    return max(max(busy.values(), default=0), max(chains, default=0))
