"""Divides the difference in time between two runs of equal work among kinds of task and lanes.

Busy times do not explain the difference, since lanes overlap: a kind of task may be twice as slow as predicted without
making the run longer. So the second run is replayed (see replayed_run.py) while one kind of task after another gets the
mean duration of the first run. The time that a replacement saves is the part of the difference that this kind causes.
Where two lanes are equally late, the order of replacements matters; the parts are therefore means over two orders,
largest first and largest last. The parts add up to the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.analysis.work_differences import WorkDifference, work_differences
from moesched.tasks import Phase
from moesched.trace.critical import critical_path
from moesched.trace.recording import LaneName, Recording, Slice

MOST_CAUSES = 8
"""Largest number of groups of tasks that are a cause each. Each costs two replays; the other groups form one cause."""

Progress = Callable[[int, int], object]


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of the difference in time between two runs.

    Attributes:
        what: "tasks" for different durations on a lane; "between tasks" for dispatch and waiting for the host; "graph"
            for different tasks, order, or spread of durations.
        kind, lane, phase: verb, lane's title and phase of the tasks; empty if several groups are summed.
        tasks: number of these tasks in the second run.
        means: mean seconds of these tasks in the first and in the second run; None for a run without such tasks.
        seconds: time that this cause adds to the second run; negative if the second run is faster.
        share: `seconds` over the whole difference; None if the runs take equally long.
    """

    what: Literal["tasks", "between tasks", "graph"]
    kind: str = ""
    lane: str = ""
    phase: Phase | Literal[""] = ""
    tasks: int = 0
    means: tuple[float | None, float | None] = (None, None)
    seconds: float
    share: float | None


class LaneCause(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and share of the time difference that one lane causes, and the lane's busy seconds in both runs."""

    lane: str
    busy_seconds: tuple[float, float]
    seconds: float
    share: float | None


class WaitTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Waits between tasks on the second run's critical path, in which only the policy or the driver worked.

    Attributes:
        kind: verb of the tasks that started after these waits.
        lane: title of these tasks' lane.
        times: number of waits.
        seconds: total duration of the waits.
    """

    kind: str
    lane: str
    times: int
    seconds: float


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference in time between two runs, without loading of weights, and its causes.

    Attributes:
        places: the indices that the first and the second run have in the comparison; if only one of the two runs is
            predicted, it is the first run here, even if its index is 1.
        run_seconds: duration of each run.
        replayed_seconds: duration of each run when its graph is replayed on the virtual clock with its own durations.
        seconds: duration of the second run minus the duration of the first.
        causes: the causes, whose seconds add up to `seconds`; largest first, but "graph" last.
        lanes: the causes summed by lane.
        waits: waits between tasks on the critical path of the second run, longest first.
        works: amounts of work that differ between the runs, such as bytes moved; the largest difference in time first.
        same_tasks: whether each lane has equally many tasks of each verb and phase in both runs.
    """

    places: tuple[int, int]
    run_seconds: tuple[float, float]
    replayed_seconds: tuple[float, float]
    seconds: float
    causes: list[Cause]
    lanes: list[LaneCause]
    waits: list[WaitTotal]
    works: list[WorkDifference]
    same_tasks: bool


def explain_difference(
    first: Recording, second: Recording, *, places: tuple[int, int] = (0, 1), progress: Progress | None = None
) -> Difference:
    """Explain why the second run took longer, or shorter, than the first.

    Args:
        places: indices of both runs in a comparison.
        progress: called with (replays done, all replays).

    Raises:
        BadInput: a recording cannot be replayed.
    """
    runs = tuple(map(without_loading, (first, second)))
    groups = tuple(map(_groups, runs))
    chosen = _parts(*groups)
    steps = _Progress(2 + 2 * len(chosen), progress)
    took = [(run.end - run.start) / 1e9 for run in runs]
    replayed = [steps.did(_replayed_seconds(run, run.durations)) for run in runs]
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
        causes=sorted(causes, key=lambda cause: (cause.what == "graph", -abs(cause.seconds))),
        lanes=_lanes(groups, chosen, losses, gap),
        waits=_waits(runs[1]),
        works=work_differences(*runs),
        same_tasks=_sizes(groups[0]) == _sizes(groups[1]),
    )


class _Group(NamedTuple):
    """Key of a group of similar tasks: phase, verb, and lane's title."""

    phase: Phase
    kind: str
    lane: str


_Groups = dict[_Group, list[Slice]]
_Part = list[_Group]


class _Progress:
    """Counts finished replays, and reports their number to a callback."""

    def __init__(self, total: int, tell: Progress | None) -> None:
        self._done = 0
        self._total = total
        self._tell = tell

    def did(self, seconds: float) -> float:
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)
        return seconds


def _sizes(groups: _Groups) -> dict[_Group, int]:
    return {group: len(slices) for group, slices in groups.items()}


def _groups(recording: Recording) -> _Groups:
    titles = recording.titles
    groups: _Groups = {}
    for each in recording.slices:
        groups.setdefault(_group(each, titles), []).append(each)
    return groups


def _group(each: Slice, titles: Mapping[LaneName, str]) -> _Group:
    return _Group(each.phase or "prefill", each.task.verb, titles[each.lane])


def _parts(first: _Groups, second: _Groups) -> list[_Part]:
    """Divide the groups that both runs have into parts: the `MOST_CAUSES` that differ most, then all others as one."""
    common = [group for group in second if group in first]
    common.sort(key=lambda group: -_differ(group, first, second))
    others = common[MOST_CAUSES:]
    return [[group] for group in common[:MOST_CAUSES]] + ([others] if others else [])


def _differ(group: _Group, first: _Groups, second: _Groups) -> float:
    """Return the difference of a group's mean seconds in both runs, times the number of its tasks in the second run."""
    return abs(_mean(second[group]) - _mean(first[group])) * len(second[group])


def _losses(
    run: Recording, groups: Sequence[_Groups], parts: Sequence[_Part], steps: _Progress
) -> list[float]:
    """Replay the second run once for each part, with the tasks of this part and of all earlier ones changed.

    A changed task's duration is scaled so that its group has the mean duration of the first run.

    Args:
        run: the second run.
        groups: the first run's groups of tasks, and the second run's.
        steps: counts the replays.

    Returns:
        The seconds that each part saves, in the order of `parts`.
    """
    first, second = groups
    titles = run.titles
    durations = run.durations
    before = _replayed_seconds(run, durations)
    losses = []
    for part in parts:
        means = {group: (_mean(first[group]), _mean(second[group])) for group in part}
        for index, each in enumerate(run.slices):
            group = _group(each, titles)
            if group in means:
                durations[index] = _as_in_first(durations[index], *means[group])
        after = steps.did(_replayed_seconds(run, durations))
        losses.append(before - after)
        before = after
    return losses


def _as_in_first(nanoseconds: int, first: float, second: float) -> int:
    """Scale a task's nanoseconds by the ratio of its group's mean seconds in the first and the second run.

    If `second` is 0, the result is `first` in nanoseconds.
    """
    return round(nanoseconds * (first / second)) if second else round(first * 1e9)


def _replayed_seconds(run: Recording, durations: Sequence[int]) -> float:
    return replay_recording(run, durations).end / 1e9


def _mean(slices: Sequence[Slice]) -> float:
    """Return the mean duration of recorded tasks, in seconds."""
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
    """Sum the losses of `parts` by lane.

    The loss of a part with several groups is divided in proportion to their differences in duration.

    Args:
        groups: the first run's groups of tasks, and the second run's.
        losses: seconds that each of `parts` adds to the second run.
        gap: seconds of the second run minus the seconds of the first.
    """
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


def _waits(run: Recording) -> list[WaitTotal]:
    titles = run.titles
    seconds: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for hop in critical_path(run):
        if hop.gap > 0:
            key = (hop.slice.task.verb, titles[hop.slice.lane])
            seconds[key] += hop.gap
            times[key] += 1
    return [
        WaitTotal(kind=kind, lane=lane, times=times[kind, lane], seconds=nanoseconds / 1e9)
        for (kind, lane), nanoseconds in seconds.most_common()
    ]
