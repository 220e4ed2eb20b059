"""Finds the bottleneck of a run: the lane or cause on the critical path whose removal would shorten the run most.

The length of a part of the critical path does not show the time that its removal would save. For example, where fetches
and kernels alternate because the pool of weight pages is full, each has half of the path, and faster fetches alone may
save nothing. So the run is replayed once per possible change: a lane is twice as fast; a pool has room, as if it had
twice the slots; the policy does not wait for the router; or ranks do not wait for each other. Time between
tasks, in which the policy or the driver runs, is not replayed; half of this time counts as saved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import msgspec

from moesched.analysis.critical_time import BETWEEN, Stretch, share_of
from moesched.analysis.idle_spans import ROUTERS, Cause
from moesched.analysis.replayed_run import replay_recording
from moesched.analysis.returning_pages import Key, key_of
from moesched.errors import BadInput
from moesched.trace.recording import Recording
from moesched.trace.waits import lacked_room

OF_A_LANE: tuple[Cause, ...] = ("data", "lane")
"""Causes whose time on the critical path is attributed to the lane that was busy."""

LEAST_SHARE = 0.1
"""The smallest share of the run's time that a part of the critical path must have for its removal to be tried."""

NEARLY = 0.9
"""A change that saves at least this fraction of the largest saving counts as equal to the best change."""

MOST_TASKS = 5000
"""Largest number of tasks in a replay: those around the middle of the run's time."""


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the critical path whose removal would shorten the run most: the tasks of one lane, or one cause.

    Attributes:
        lane: title of the lane whose tasks take most of `seconds`. With the cause "policy" or "host", no task ran: then
            the lane of the tasks that started next.
        cause: the reason why the critical path waited in this part, as in `idle_spans.Cause`: "budget" for a full pool,
            for example. "data" and "lane" mean that `lane` itself is too slow.
        kind: the verb that takes most of `seconds`; "policy" or "host" for the time between tasks.
        kind_seconds: the part of `seconds` that tasks of `kind` take. If the cause is neither "data" nor "lane", only
            tasks on `lane` count.
        line: the line of the policy whose tasks take most of `seconds`, as file:line; empty if none is known.
        seconds: time of this part on the critical path. The lanes of a network are added up over all ranks.
        ranks: number of ranks whose lanes `seconds` covers; 1 if the cause is neither "data" nor "lane".
        share: `seconds` over the time of the run.
        saved: share of the run's time, from 0 to 1, that a lane twice as fast, or the removal of the cause, would save.
    """

    lane: str
    kind: str
    kind_seconds: float
    cause: Cause
    line: str
    seconds: float
    ranks: int
    share: float
    saved: float


class _Part(NamedTuple):
    """Stretches of the critical path that one change of the run would shorten, such as a faster lane.

    Attributes:
        lane: title of the lane to blame, or the name that the lanes of collectives share on all ranks; empty if a cause
            is to blame.
        cause: the cause to blame; None if a lane is to blame.
    """

    lane: str
    cause: Cause | None
    stretches: list[Stretch]

    @property
    def nanoseconds(self) -> int:
        return sum(each.nanoseconds for each in self.stretches)


def bottleneck(
    recording: Recording, stretches: Sequence[Stretch], returning: Set[Key] = frozenset()
) -> Bottleneck | None:
    """Find the bottleneck of a run; None if no task ran.

    Args:
        recording: the run, without the loading of weights.
        stretches: the run's critical path, in order of time.
        returning: keys (rank, task id) of the fetches that a pool with twice the slots would not need.
    """
    parts = _parts(stretches, _networks(recording))
    if not parts:
        return None
    total = recording.end - recording.start
    large = [part for part in parts if part.nanoseconds >= LEAST_SHARE * total] or parts[:1]
    saved = _savings(recording, large, returning)
    # Where two lanes are equally busy, each would save nearly the same: the longer part of the path is named.
    part, share = next(
        (part, each) for part, each in zip(large, saved, strict=True) if each >= NEARLY * max(saved)
    )
    lane = _most(part.stretches, "lane")
    blamed = [each for each in part.stretches if part.cause is None or each.lane == lane]
    kind = _most(blamed, "kind")
    return Bottleneck(
        lane=lane,
        kind=kind,
        kind_seconds=sum(each.nanoseconds for each in blamed if each.kind == kind) / 1e9,
        cause=part.cause or _most(part.stretches, "cause"),
        line=_most(part.stretches, "line"),
        seconds=part.nanoseconds / 1e9,
        ranks=len({each.lane for each in blamed}),
        share=share_of(part.nanoseconds, total),
        saved=share,
    )


def _networks(recording: Recording) -> dict[str, str]:
    """Map the title of each lane that ran collectives to the lane's name, which is equal on all ranks."""
    titles = recording.titles
    lanes = {each.lane for each in recording.slices if each.ticket >= 0}
    return {titles[lane]: lane.name for lane in lanes}


def _parts(stretches: Sequence[Stretch], networks: Mapping[str, str]) -> list[_Part]:
    """Group the stretches of the critical path by the lane or cause to blame, the longest group first.

    Args:
        networks: names of the network's lanes by title; lanes of one name are grouped over all ranks.
    """
    groups: dict[tuple[str, Cause | None], list[Stretch]] = {}
    for each in stretches:
        lane = networks.get(each.lane, each.lane)
        blamed = (lane, None) if each.cause in OF_A_LANE else ("", each.cause)
        groups.setdefault(blamed, []).append(each)
    parts = [_Part(lane, cause, group) for (lane, cause), group in groups.items()]
    return sorted(parts, key=lambda part: -part.nanoseconds)


def _savings(recording: Recording, parts: Sequence[_Part], returning: Set[Key]) -> list[float]:
    """Replay the middle of the run once for each part, with the part's lane twice as fast or its cause removed.

    Returns:
        For each part, the share of the run's time that this change would save, from 0 to 1.
    """
    total = recording.end - recording.start
    first = _first_of_middle(recording)
    window = recording.part(range(first, min(first + MOST_TASKS, len(recording.slices))), trimmed=True)
    try:
        before = _length(window, window.durations)
    except BadInput:  # not a whole run: the path has to do
        return [share_of(part.nanoseconds, total) / 2 for part in parts]
    saved = []
    for part in parts:
        if part.cause in BETWEEN:
            saved.append(share_of(part.nanoseconds, total) / 2)
        else:
            saved.append(max(0.0, 1 - _length(*_relieved(window, part, returning)) / before))
    return saved


def _first_of_middle(recording: Recording) -> int:
    """Return the index of the first of the `MOST_TASKS` recorded tasks around the middle of the run's time."""
    slices = recording.slices
    middle = bisect_left(slices, (recording.start + recording.end) // 2, key=lambda each: each.end)
    return max(0, min(middle - MOST_TASKS // 2, len(slices) - MOST_TASKS))


def _relieved(recording: Recording, part: _Part, returning: Set[Key]) -> tuple[Recording, list[int]]:
    """Return a recording and its tasks' durations in nanoseconds, changed to shorten one part of the critical path.

    If a lane is to blame, its tasks get half of their recorded durations. If the cause is a full pool, no transfer
    waits for room, and the fetches in `returning`, unnecessary with twice the slots, take no time. If the cause is
    "rank" or "router", ranks do not wait for each other, or the policy does not wait for routers.
    """
    durations = recording.durations
    if part.cause is None:
        slow = {lane for lane, title in recording.titles.items() if part.lane in (lane.name, title)}
        halved = [
            nanoseconds // 2 if each.lane in slow else nanoseconds
            for each, nanoseconds in zip(recording.slices, durations, strict=True)
        ]
        return recording, halved
    if part.cause == "budget":
        fetched = [
            0 if key_of(each) in returning else nanoseconds
            for each, nanoseconds in zip(recording.slices, durations, strict=True)
        ]
        return _with_room(recording), fetched
    slices = [msgspec.structs.replace(each) for each in recording.slices]
    for each in slices:
        if part.cause == "rank":
            each.ticket = -1
        elif each.task.verb in ROUTERS:
            each.awaited_at = -1
    return msgspec.structs.replace(recording, slices=slices), durations


def _with_room(recording: Recording) -> Recording:
    """Return a copy of the recording without the dependencies by which transfers waited for room in a pool."""
    slices = recording.slices
    producers = [
        tuple(each for each in before if not lacked_room(slices[each], slices[index]))
        for index, before in enumerate(recording.producers)
    ]
    return msgspec.structs.replace(recording, producers=producers)


def _length(recording: Recording, durations: Sequence[int]) -> int:
    """Return the nanoseconds that a replay of the recording takes if each of its tasks takes the given nanoseconds."""
    return replay_recording(recording, durations, handovers=True).end


def _most(stretches: Sequence[Stretch], field: Literal["lane", "kind", "cause", "line"]) -> Any:
    """Return the value of `field` with the most time in these stretches, such as a verb for the field "kind"."""
    spent: Counter[str] = Counter()
    for each in stretches:
        spent[getattr(each, field)] += each.nanoseconds
    return spent.most_common(1)[0][0]
