"""Why two runs of the same work took different times: the gap between them, shared out among kinds of task and lanes.

Busy times do not say it, since lanes overlap: a kind of task may be twice as slow as predicted and cost nothing. So
the second run is replayed (see replayed_run.py) with the durations of one kind after another brought to those of
the first run, and what the total loses at each is that kind's part of the gap. Who comes first matters where two
lanes are equally late; kinds are taken in both orders, the largest first and the largest last, and each part is the
mean. All parts add up to the gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.trace.critical import critical_path
from moesched.trace.recording import Recording, Slice
from moesched.trace.summary import lane_title

MOST_CAUSES = 8
"""Kinds of task that are told apart; the others come together, since each costs two replays."""

Phase = Literal["", "prefill", "decode"]
Progress = Callable[[int, int], object]


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the gap.

    Attributes:
        what: "tasks" that took longer or shorter, on a lane; what passed "between tasks", in dispatching them and in
            waiting for the host; or the "graph": other tasks, another order, another spread of durations.
        kind, lane, phase: of those tasks; empty where it is several of them.
        tasks: how many there are in the second run.
        means: the mean seconds of such a task in the first run and in the second; None where it has none.
        seconds: how much longer the second run is for it.
        share: of the whole gap, signed; None where there is no gap.
    """

    what: Literal["tasks", "between tasks", "graph"]
    kind: str = ""
    lane: str = ""
    phase: Phase = ""
    tasks: int = 0
    means: tuple[float | None, float | None] = (None, None)
    seconds: float
    share: float | None


class LaneCause(msgspec.Struct, frozen=True, kw_only=True):
    """What all causes on one lane come to, beside its busy seconds in the first run and in the second."""

    lane: str
    busy_seconds: tuple[float, float]
    seconds: float
    share: float | None


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the second run in which nothing held a kind of task but the policy or the driver, and how often."""

    kind: str
    lane: str
    times: int
    seconds: float


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The gap between two runs, loading left out.

    Attributes:
        places: of the first and the second in the comparison; the first is the predicted one where only one is.
        run_seconds: what each took.
        replayed_seconds: what each takes when its graph runs on the virtual clock with its own durations.
        seconds: how much longer the second one took.
        causes: parts of the gap, those that make most of it first; they add up to it.
        lanes: the same, by lane.
        waits: gaps on the second run's critical path, the longest first.
    """

    places: tuple[int, int]
    run_seconds: tuple[float, float]
    replayed_seconds: tuple[float, float]
    seconds: float
    causes: list[Cause]
    lanes: list[LaneCause]
    waits: list[Wait]


def explain_difference(
    first: Recording, second: Recording, *, places: tuple[int, int] = (0, 1), progress: Progress | None = None
) -> Difference:
    """Say why the second run took longer, or shorter, than the first.

    Args:
        places: where the runs stand in a comparison.
        progress: told of replays done and to do.

    Raises:
        BadInput: a recording cannot be replayed.
    """
    runs = tuple(map(without_loading, (first, second)))
    groups = tuple(map(_groups, runs))
    chosen = _parts(*groups)
    steps = _Progress(2 + 2 * len(chosen), progress)
    took = [(run.end - run.start) / 1e9 for run in runs]
    replayed = [steps.did(_replayed_seconds(run, _durations(run))) for run in runs]
    gap = took[1] - took[0]
    one_way = _losses(runs[1], groups, chosen, steps)
    other_way = _losses(runs[1], groups, chosen[::-1], steps)[::-1]
    losses = [fmean(pair) for pair in zip(one_way, other_way, strict=True)]
    between = (took[1] - replayed[1]) - (took[0] - replayed[0])
    graph = replayed[1] - sum(losses) - replayed[0]
    causes = [_cause(part, groups, seconds, gap) for part, seconds in zip(chosen, losses, strict=True)]
    causes.append(Cause(what="between tasks", seconds=between, share=_share(between, gap)))
    causes.append(Cause(what="graph", seconds=graph, share=_share(graph, gap)))
    return Difference(
        places=places,
        run_seconds=(took[0], took[1]),
        replayed_seconds=(replayed[0], replayed[1]),
        seconds=gap,
        causes=sorted(causes, key=lambda cause: -abs(cause.seconds)),
        lanes=_lanes(groups, chosen, losses, gap),
        waits=_waits(runs[1]),
    )


class _Group(NamedTuple):
    """Tasks that are alike: their phase, their verb, the title of their lane."""

    phase: Phase
    kind: str
    lane: str


_Groups = dict[_Group, list[Slice]]
_Part = list[_Group]


class _Progress:
    """Counts replays."""

    def __init__(self, total: int, tell: Progress | None) -> None:
        self._done = 0
        self._total = total
        self._tell = tell

    def did(self, seconds: float) -> float:
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)
        return seconds


def _groups(recording: Recording) -> _Groups:
    ranks = len({lane.rank for lane in recording.lanes})
    groups: _Groups = {}
    for each in recording.slices:
        groups.setdefault(_group(each, ranks), []).append(each)
    return groups


def _group(each: Slice, ranks: int) -> _Group:
    return _Group("decode" if each.step > 0 else "prefill", each.verb, lane_title(each.lane, ranks))


def _parts(first: _Groups, second: _Groups) -> list[_Part]:
    """The groups that both have; those whose durations differ most by themselves, then all others as one."""
    common = [group for group in second if group in first]
    common.sort(key=lambda group: -_differ(group, first, second))
    others = common[MOST_CAUSES:]
    return [[group] for group in common[:MOST_CAUSES]] + ([others] if others else [])


def _differ(group: _Group, first: _Groups, second: _Groups) -> float:
    """Seconds that the group's tasks would take more or less together if their mean were that of the first run."""
    return abs(_mean(second[group]) - _mean(first[group])) * len(second[group])


def _losses(
    run: Recording, groups: Sequence[_Groups], parts: Sequence[_Part], steps: _Progress
) -> list[float]:
    """Seconds that the run's replay loses as one part after the other gets the first run's mean durations."""
    first, second = groups
    ranks = len({lane.rank for lane in run.lanes})
    durations = _durations(run)
    before = _replayed_seconds(run, durations)
    losses = []
    for part in parts:
        factors = {group: _mean(first[group]) / _mean(second[group]) for group in part}
        for index, each in enumerate(run.slices):
            factor = factors.get(_group(each, ranks))
            if factor is not None:
                durations[index] = round(durations[index] * factor)
        after = steps.did(_replayed_seconds(run, durations))
        losses.append(before - after)
        before = after
    return losses


def _durations(run: Recording) -> list[int]:
    return [each.end - each.start for each in run.slices]


def _replayed_seconds(run: Recording, durations: Sequence[int]) -> float:
    return replay_recording(run, durations).end / 1e9


def _mean(slices: Sequence[Slice]) -> float:
    """Seconds."""
    return fmean(each.end - each.start for each in slices) / 1e9


def _share(seconds: float, gap: float) -> float | None:
    return seconds / gap if gap else None


def _cause(part: _Part, groups: Sequence[_Groups], seconds: float, gap: float) -> Cause:
    first, second = groups
    tasks = sum(len(second[group]) for group in part)
    if len(part) > 1:
        return Cause(what="tasks", tasks=tasks, seconds=seconds, share=_share(seconds, gap))
    [group] = part
    return Cause(
        what="tasks",
        kind=group.kind,
        lane=group.lane,
        phase=group.phase,
        tasks=tasks,
        means=(_mean(first[group]), _mean(second[group])),
        seconds=seconds,
        share=_share(seconds, gap),
    )


def _lanes(
    groups: Sequence[_Groups],
    parts: Sequence[_Part],
    losses: Sequence[float],
    gap: float,
) -> list[LaneCause]:
    """A part of several groups is shared out among their lanes by how much their durations differ."""
    first, second = groups
    seconds: dict[str, float] = {}
    for part, loss in zip(parts, losses, strict=True):
        weights = {group: _differ(group, first, second) for group in part}
        total = sum(weights.values())
        for group in part:
            share = weights[group] / total if total else 1 / len(part)
            seconds[group.lane] = seconds.get(group.lane, 0.0) + loss * share
    lanes = []
    for name in dict.fromkeys(group.lane for each in groups for group in each):
        busy = [
            sum(_mean(slices) * len(slices) for group, slices in each.items() if group.lane == name)
            for each in groups
        ]
        lanes.append(
            LaneCause(
                lane=name,
                busy_seconds=(busy[0], busy[1]),
                seconds=seconds.get(name, 0.0),
                share=_share(seconds.get(name, 0.0), gap),
            )
        )
    return sorted(lanes, key=lambda lane: -abs(lane.seconds))


def _waits(run: Recording) -> list[Wait]:
    ranks = len({lane.rank for lane in run.lanes})
    seconds: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for hop in critical_path(run):
        if hop.gap > 0:
            key = (hop.task.verb, lane_title(hop.task.lane, ranks))
            seconds[key] += hop.gap
            times[key] += 1
    return [
        Wait(kind=kind, lane=lane, times=times[kind, lane], seconds=nanoseconds / 1e9)
        for (kind, lane), nanoseconds in seconds.most_common()
    ]
