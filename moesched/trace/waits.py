"""Finds the reason why each task of a recording started no earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from moesched.trace.recording import LaneName, Recording, Slice

Why = Literal["start", "data", "room", "lane", "rank", "await"]


_START: Why = "start"


class Wait(NamedTuple):
    """The last thing that a task waited for before it started.

    Attributes:
        waited_for: index of the slice (a task that ran) that this task waited for, here called the earlier task; -1 if
            it waited for none.
        why: "data": this task reads the earlier one's result; "room": this task overwrites weights that the earlier one
            used; "lane": the earlier one occupied the lane; "rank": this task is a part of a collective, and the
            earlier one held up the part of another rank; "await": the policy awaited the earlier one, and then
            submitted this task; "start": `waited_for` is -1.
        policy: nanoseconds in which the policy ran, between the earlier task's end (or the start of the recording) and
            the start of this task.
        host: the remaining nanoseconds between these two times: the driver ran, and the lane's thread woke up.
    """

    waited_for: int
    why: Why
    policy: int
    host: int


def waits_of(recording: Recording) -> list[Wait]:
    """Return the last wait of each recorded task, in the order of the recording's slices."""
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
    """Yield the index of each task that may have held up the task at `index`, with the reason.

    Of the tasks yielded, the caller takes the one that ended last; if several ended together, the one that was yielded
    first. An index of -1 stands for no task.

    Args:
        on_lane: for each task, the index of the previous task on its lane; -1 if none.
        parts: indices of the tasks that are one collective's parts on the ranks, by the collective's number.
        awaited: index of the task that the policy awaited last before it submitted the task.
    """
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
    """Test whether `each` had to wait for `before` because it overwrites weights that `before` used.

    The result is False if `each` waited for data instead. This is so if `each` moves no weights, or if `before` moved
    the same weights to the memory from which `each` moves them on.
    """
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
    """Return, for each task, the index of the last task that the policy awaited before it submitted this one.

    The index is -1 if the policy had awaited none.
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
