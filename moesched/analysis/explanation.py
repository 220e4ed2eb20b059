"""Explains the time of a run: lanes, critical path, bottleneck, pools, and the time between tasks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from moesched.analysis.bottleneck import Bottleneck, bottleneck
from moesched.analysis.critical_time import PathPart, path_parts, stretches_of
from moesched.analysis.helps import Help, helps
from moesched.analysis.lane_times import LaneTime, lane_times, together
from moesched.analysis.replayed_run import without_loading
from moesched.analysis.returning_pages import returning_pages
from moesched.analysis.what_if import Progress, WhatIf, what_if
from moesched.errors import BadInput
from moesched.steps.pool_counts import Counted
from moesched.trace.recording import About, PoolSample, Recording, Slice
from moesched.trace.waits import waits_of


class PoolUses(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a pool's pages in a whole run: fetched, found in the pool, missed, prefetched in vain, or cancelled."""

    fetched: int
    hits: int
    misses: int
    wasted_prefetches: int
    cancelled: int


class HandoverTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time lost before tasks of one verb on one lane, on the critical path or not.

    Attributes:
        tasks: number of these tasks before which time was lost.
        dispatch_seconds: total time to wake the lane's thread.
        submit_seconds: total time in which the lane was idle until the policy submitted the task.
    """

    kind: str
    lane: str
    tasks: int
    dispatch_seconds: float
    submit_seconds: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation of a run's time; the initial loading of weights is left out.

    Attributes:
        figures: "predicted" or "measured".
        seconds: time from the start of the first task after loading to the end of the last task.
        overlap: the mean number of lanes that were busy while at least one was.
        bottleneck: the lane or cause that costs the run most time; None if no task ran.
        lanes: time of each lane by its name, with the rank if there are several.
        critical_path: time of the critical path by kind, lane and cause, longest first.
        pools: uses of each pool, by its name and memory.
        handovers: time between tasks by kind of task, longest first; empty for predictions.
        what_if: results of the replays with the requested changes.
        helps: changes that would save the most time, the best first.
    """

    policy: str
    model: str
    machine: str
    figures: str
    seconds: float
    tasks: int
    overlap: float
    bottleneck: Bottleneck | None
    lanes: dict[str, LaneTime]
    critical_path: list[PathPart]
    pools: dict[str, PoolUses]
    handovers: list[HandoverTime]
    what_if: list[WhatIf]
    helps: list[Help]


def explain(
    recording: Recording,
    about: About,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
    *,
    decode_steps: int | None = None,
) -> Explanation:
    """Explain where the time of a run went.

    Args:
        about: the recording's metadata: policy, model, machine, and kind of figures.
        changes: changes to replay the run with, each in the syntax of `what_if`.
        progress: called with (replays done, all replays).
        decode_steps: number of the whole run's decode steps, if only the first ones were recorded; these then stand
            for all.

    Raises:
        BadInput: no task ran, tasks took no time, or a change cannot be read or names something that the run lacks.
    """
    if not recording.slices:
        raise BadInput("the trace has no tasks: record a run that generates tokens")
    run = without_loading(recording)
    if decode_steps is not None and not recording.trimmed:
        run = _lengthened(run, decode_steps)
    total = run.end - run.start
    if not total:
        raise BadInput("the tasks of the trace take no time: record the run again")
    waits = waits_of(run)
    returning = returning_pages(recording)
    stretches = list(stretches_of(run, waits, returning))
    busy = together(run)
    path = path_parts(stretches, total)
    return Explanation(
        policy=about.policy,
        model=about.model,
        machine=about.machine,
        figures=about.figures,
        seconds=total / 1e9,
        tasks=len(run.slices),
        overlap=busy.overlap,
        bottleneck=bottleneck(run, stretches, returning),
        lanes=lane_times(run, waits, busy.alone),
        critical_path=path,
        pools=_pools(recording.pools),
        handovers=_handovers(run),
        what_if=what_if(recording, changes, progress),
        helps=helps(recording, path, decode_steps),
    )


def _pools(samples: Sequence[PoolSample]) -> dict[str, PoolUses]:
    """Return the uses of each pool in the whole run, by the pool's name, with its rank if there are several."""
    last: dict[tuple[int, str], Counted] = {(sample.rank, sample.pool): sample.counted for sample in samples}
    ranks = len({rank for rank, _ in last})
    return {
        pool if ranks == 1 else f"rank {rank} {pool}": PoolUses(
            fetched=counted.fetched,
            hits=counted.hits,
            misses=counted.misses,
            wasted_prefetches=counted.wasted,
            cancelled=counted.cancelled,
        )
        for (rank, pool), counted in last.items()
    }


def _handovers(run: Recording) -> list[HandoverTime]:
    titles = run.titles
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for each in run.slices:
        if each.dispatch > 0 or each.submit_delay > 0:
            times = (each.dispatch, max(0, each.submit_delay))
            found.setdefault((each.task.verb, titles[each.lane]), []).append(times)
    handovers = [
        HandoverTime(
            kind=kind,
            lane=lane,
            tasks=len(times),
            dispatch_seconds=sum(dispatch for dispatch, _ in times) / 1e9,
            submit_seconds=sum(submit for _, submit in times) / 1e9,
        )
        for (kind, lane), times in found.items()
    ]
    return sorted(handovers, key=lambda each: -each.dispatch_seconds - each.submit_seconds)


def _lengthened(run: Recording, decode_steps: int) -> Recording:
    """Return a run's first steps with decode stretched to the time that all decode steps of the run would take.

    No task is added. In the result the prefill has its true share of the run's time.

    Args:
        run: the first steps of a run, without the loading of weights.
        decode_steps: number of the whole run's decode steps; if no fewer were recorded, nothing is stretched.
    """
    recorded = len({each.step for each in run.slices if each.phase == "decode"})
    if not 0 < recorded < decode_steps:
        return run
    prefill = max((each.end for each in run.slices if each.phase == "prefill"), default=run.start)

    def stretched(nanoseconds: int) -> int:
        return nanoseconds * decode_steps // recorded

    def moved(moment: int) -> int:
        return prefill + stretched(moment - prefill) if moment > prefill else moment

    def moved_slice(each: Slice) -> Slice:
        if each.end <= prefill:
            return each
        longer = replace(each, start=moved(each.start), end=moved(each.end))
        if each.start < prefill:
            return longer
        delay = each.submit_delay
        return replace(
            longer,
            dispatch=stretched(each.dispatch),
            launching=stretched(each.launching),
            submit_delay=stretched(delay) if delay > 0 else delay,
        )

    return replace(run, slices=[moved_slice(each) for each in run.slices])
