"""The last wait of each task before it started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from moesched.trace.recording import LaneName, Recording, Slice

Why = Literal["start", "data", "room", "lane", "rank", "await"]


_START: Why = "start"


class Wait(NamedTuple):
    """A task's last wait before it started.

    Attributes:
        before: index of the slice that it waited for; -1 if it waited for none that was recorded.
        why: it reads a result of that slice ("data"); it overwrites weights that the slice used ("room"); the slice
            occupied its lane ("lane"); the slice held up another rank's part of the same collective ("rank"); or the
            policy awaited the slice before it submitted the task ("await"). "start" if it waited for none.
        policy: nanoseconds after that slice, or after the start of the recording, in which the policy ran.
        host: nanoseconds after that until the task started, in which the driver ran and the lane's thread woke up.
    """

    before: int
    why: Why
    policy: int
    host: int


def waits_of(recording: Recording) -> list[Wait]:
    """Return the last wait of each slice, by the slice's index."""
    slices = recording.slices
    on_lane, parts, awaited = _before_on_lane(slices), _collectives(slices), _awaited(recording)
    waits, start = [], recording.start
    for index, each in enumerate(slices):
        before, why, end = -1, _START, start
        for candidate, reason in _candidates(recording, index, on_lane, parts, awaited[index]):
            # Indices only decrease on the way back, so that walks end even if clocks were wrong.
            if 0 <= candidate < index and (before < 0 or slices[candidate].end > end):
                before, why, end = candidate, reason, slices[candidate].end
        gap = max(0, each.start - end)
        policy = max(0, gap - each.dispatch) if each.submit_delay >= 0 else 0
        waits.append(Wait(before, why, policy, gap - policy))
    return waits


def _candidates(
    recording: Recording,
    index: int,
    on_lane: Sequence[int],
    parts: Mapping[int, Sequence[int]],
    awaited: int,
) -> Iterator[tuple[int, Why]]:
    """Yield the slices that may have held up a slice; of those that ended together, the first one counts."""
    slices, producers = recording.slices, recording.producers
    each = slices[index]
    # A task whose lane was idle until the policy submitted it had nothing else to wait for.
    if each.submit_delay < 0:
        for producer in producers[index]:
            yield producer, "room" if lacked_room(slices[producer], each) else "data"
        yield on_lane[index], "lane"
        for other in parts.get(each.ticket, ()):
            if other != index:
                for producer in (*producers[other], on_lane[other]):
                    yield producer, "rank"
    yield awaited, "await"


def lacked_room(before: Slice, each: Slice) -> bool:
    """Test whether a transfer of weights waited for `before` because that used its destination, not its source."""
    one, other = before.task, each.task
    return other.pages > 0 and not (one.pages and (one.layer, one.expert) == (other.layer, other.expert))


def _before_on_lane(slices: Sequence[Slice]) -> list[int]:
    last: dict[LaneName, int] = {}
    before = []
    for index, each in enumerate(slices):
        before.append(last.get(each.lane, -1))
        last[each.lane] = index
    return before


def _collectives(slices: Sequence[Slice]) -> dict[int, list[int]]:
    parts: dict[int, list[int]] = {}
    for index, each in enumerate(slices):
        if each.ticket >= 0:
            parts.setdefault(each.ticket, []).append(index)
    return parts


def _awaited(recording: Recording) -> list[int]:
    """Return, for each slice, the index of the slice that the policy had awaited last when it submitted the task.

    -1 stands for none.
    """
    slices = recording.slices
    awaits: dict[int, list[tuple[int, int]]] = {}
    submitted: dict[int, list[tuple[int, int]]] = {}
    for index, each in enumerate(slices):
        submitted.setdefault(each.lane.rank, []).append((each.id, index))
        if each.awaited_at >= 0:
            awaits.setdefault(each.lane.rank, []).append((each.awaited_at, index))
    found = [-1] * len(slices)
    for rank, tasks in submitted.items():
        left = sorted(awaits.get(rank, ()), reverse=True)
        last = -1
        for number, index in sorted(tasks):
            while left and left[-1][0] <= number:
                last = max(last, left.pop()[1])
            found[index] = last
    return found
