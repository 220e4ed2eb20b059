"""Merges several nodes' recordings to one, with all times on a common clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from moesched.trace.recording import LaneName, Recording, Slice


def merge_recordings(
    recordings: Mapping[int, Recording], ahead: Mapping[int, Callable[[int], int]]
) -> Recording:
    """Merge the recordings of all nodes; each lane gets its node's rank, and time 0 is the earliest start of any node.

    Args:
        recordings: recordings by rank, each of one engine; a recording's `origin` is its start on its node's clock.
        ahead: by rank, a function that takes a time on the node's clock, and returns the nanoseconds by which this
            clock is ahead of the common one; a rank without a function has the common clock.
    """
    first = min(_common(each.origin, ahead.get(rank)) for rank, each in recordings.items())

    def moved(rank: int, time: int) -> int:
        return _common(recordings[rank].origin + time, ahead.get(rank)) - first

    found = sorted(
        (
            (rank, index, moved(rank, each.end))
            for rank, recording in recordings.items()
            for index, each in enumerate(recording.slices)
        ),
        key=lambda each: each[2],
    )
    positions = {(rank, index): position for position, (rank, index, _) in enumerate(found)}
    slices: list[Slice] = []
    producers: list[tuple[int, ...]] = []
    for rank, index, end in found:
        each = recordings[rank].slices[index]
        lane = LaneName(rank, each.lane.name)
        slices.append(replace(each, lane=lane, start=moved(rank, each.start), end=end))
        producers.append(tuple(positions[rank, made] for made in recordings[rank].producers[index]))
    return Recording(
        lanes=[LaneName(rank, lane.name) for rank, each in recordings.items() for lane in each.lanes],
        slices=slices,
        producers=producers,
        memory=[
            sample._replace(rank=rank, time=moved(rank, sample.time))
            for rank, each in recordings.items()
            for sample in each.memory
        ],
        trimmed=any(each.trimmed for each in recordings.values()),
        joins=sum(each.joins for each in recordings.values()),
        in_order=frozenset(
            LaneName(rank, lane.name) for rank, each in recordings.items() for lane in each.in_order
        ),
        origin=first,
        pools=[
            sample._replace(rank=rank, time=moved(rank, sample.time))
            for rank, each in recordings.items()
            for sample in each.pools
        ],
        cancelled=sorted(
            (
                replace(cancelled, lane=LaneName(rank, cancelled.lane.name), time=moved(rank, cancelled.time))
                for rank, each in recordings.items()
                for cancelled in each.cancelled
            ),
            key=lambda cancelled: cancelled.time,
        ),
    )


def _common(time: int, ahead: Callable[[int], int] | None) -> int:
    """Convert a time on a node's clock to the common clock, in nanoseconds.

    Args:
        ahead: returns the nanoseconds by which the node's clock is ahead at a given time; None if it is never ahead.
    """
    return time if ahead is None else time - ahead(time)
