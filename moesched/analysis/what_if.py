"""Replays a recorded run with a change: faster links, other kernels, or no time between tasks.

The task graph stays as it was recorded. A policy that awaits results, such as a router's choices, might decide
otherwise after the change; `WhatIf.decisions_unchanged` then says that its recorded decisions were kept. With
`simulate --machine-set` the policy decides anew.

A predicted run's trace has the cost of each task: its time when it runs alone, the fixed part of this time, and the
task's shares of processors, memories and links. A change applies to these costs, and the virtual clock shares resources
anew. The durations of a measured run are scaled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moesched.analysis.handovers import Handover, mean_handovers
from moesched.analysis.replayed_run import replay_recording, timed_work, without_loading
from moesched.analysis.run_changes import Change, parse_change
from moesched.trace.recording import Recording, Slice
from moesched.work import Demand, Work

LAST = "sample"
"""The last verb of a step. Every policy awaits it, so awaiting it does not count as deciding by results."""

Progress = Callable[[int, int], object]

DECISIONS_HELD = (
    "The policy decides as it goes; its decisions were held. `simulate --machine-set` lets it decide anew."
)
"""The note below the results of replays, if the policy decides by awaited results."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time of a recorded run after a change.

    Attributes:
        change: the change as the user wrote it.
        seconds: duration of the recorded run, times a ratio: the duration of a replay with the change over the
            duration of a replay without it. All durations are without loading.
        speedup: duration of the recorded run, without loading, over `seconds`.
        decisions_unchanged: True if the replay kept decisions that the policy might make otherwise after the change,
            since it awaited results within its steps, such as a router's choices. False if the policy awaited no
            results but the sampled tokens.
    """

    change: str
    seconds: float
    speedup: float
    decisions_unchanged: bool


def what_if(recording: Recording, changes: Sequence[str], progress: Progress | None = None) -> list[WhatIf]:
    """Replay a run once without a change, and once with each change.

    Args:
        recording: the whole run with its loading of weights, which may delay later tasks.
        changes: each is one change, or several joined by commas (see `KINDS`); "no handovers" removes the time between
            tasks.
        progress: called with (replays done, all replays).

    Raises:
        BadInput: a change cannot be read, names a lane or a verb that the run does not have, or the recording cannot be
            replayed.
    """
    asked = [parse_change(text, recording) for text in changes]
    if not asked:
        return []
    told = progress or (lambda done, total: None)
    took = _after_loading(recording)
    decides = decides_as_it_goes(recording)
    before = _after_loading(replayed_with(recording, Change()))
    told(1, 1 + len(asked))
    answers = []
    for number, (text, change) in enumerate(zip(changes, asked, strict=True), 2):
        ratio = _after_loading(replayed_with(recording, change)) / before
        told(number, 1 + len(asked))
        answers.append(
            WhatIf(change=text, seconds=took * ratio, speedup=1 / ratio, decisions_unchanged=decides)
        )
    return answers


def decides_as_it_goes(recording: Recording) -> bool:
    """Test whether the policy awaited results within its steps, so that it might decide otherwise after a change."""
    return any(
        each.awaited_at >= 0 and each.step >= 0 and each.task.verb != LAST for each in recording.slices
    )


def changed_works(recording: Recording, change: Change) -> list[Work]:
    """Return the `Work` of each recorded task after a change, in the order of `recording.slices`."""
    handovers = mean_handovers(recording) if change.handovers else [Handover()] * len(recording.slices)
    known: dict[tuple[int, str], Work] = {}
    works = []
    for each, handover in zip(recording.slices, handovers, strict=True):
        key = (id(each.task), each.lane.name)
        work = known.get(key)
        if work is None:
            demand = recording.costs.get(each.task.work)
            if demand is None:
                work = _scaled(each, change, handover.dispatch)
            else:
                work = known[key] = _modelled(each, demand, change)
        works.append(work)
    return works


def replayed_with(recording: Recording, change: Change) -> Recording:
    """Replay a run with a change.

    Raises:
        BadInput: the recording cannot be replayed.
    """
    works = changed_works(recording, change)
    return replay_recording(recording, works=works, handovers=change.handovers)


def _after_loading(recording: Recording) -> float:
    run = without_loading(recording)
    return (run.end - run.start) / 1e9


def _scaled(each: Slice, change: Change, lead: int) -> Work:
    """Return a measured task's `Work` after a change: `lead` nanoseconds of dispatch, then the scaled duration."""
    factor = change.factor("time", each.task, each.lane) / change.factor("rate", each.task, each.lane)
    return timed_work(each.task, max(1, round((each.end - each.start) * factor)), lead)


def _modelled(each: Slice, demand: Demand, change: Change) -> Work:
    """Return a predicted task's `Work` after a change; changed rates leave the fixed part of its time as it is."""
    time = change.factor("time", each.task, each.lane)
    rate = change.factor("rate", each.task, each.lane)
    fixed = time * demand.fixed
    working = time * (demand.seconds - demand.lead - demand.fixed) / rate
    seconds = demand.lead + fixed + working
    amounts = {resource: time * share * demand.seconds for resource, share in demand.shares}
    if each.lane.name in amounts:
        amounts[each.lane.name] /= rate
    shares = tuple((resource, min(1.0, amount / seconds)) for resource, amount in amounts.items())
    nanoseconds = max(1, round(seconds * 1e9))
    return Work(
        each.task.kind,
        each.task.resource,
        nanoseconds=nanoseconds,
        lead=min(round(demand.lead * 1e9), nanoseconds - 1),
        demand=demand._replace(seconds=seconds, shares=shares, fixed=fixed),
    )
