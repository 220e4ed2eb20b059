"""Finds the changes that would save a run the most time, by replays of the run's first steps with each change.

Candidates come from the critical path: links at twice their rate, kernels in half their time, and no time between
tasks. Only the first steps are replayed: at least two, and further steps up to `MOST_TASKS` tasks in all. The time
saved in the replayed decode steps is extrapolated to all decode steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import msgspec

from moesched.analysis.critical_time import BETWEEN, PathPart
from moesched.analysis.replayed_run import without_loading
from moesched.analysis.run_changes import NO_HANDOVERS, Change, parse_change
from moesched.analysis.what_if import decides_as_it_goes, replayed_with
from moesched.drivers.pricing import no_garbage_collection
from moesched.errors import BadInput
from moesched.trace.recording import WAIT, Recording, phase_of
from moesched.trace.summary import summarize

MOST_HELPS = 3
LEAST_SAVED = 0.02
"""The smallest share of the run's time that a reported change saves."""
MOST_TASKS = 4_000
"""Largest number of tasks in a replay, unless the prefill and one decode step have more."""
FEWEST_STEPS = 2
TOO_MANY_TASKS = 40_000
"""If the prefill and one decode step have more tasks than this, nothing is replayed."""


class Help(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a run that would save time.

    Attributes:
        change: the change in words.
        command: arguments of the `moesched` command that shows the change's effect, with the word TRACE in place of the
            path of the run's trace.
        saved: share of the run's time, without loading, that the change saves.
        decisions_unchanged: True if `saved` assumes that the policy decides as recorded, although it awaited results
            within steps, and might decide otherwise after the change.
    """

    change: str
    command: str
    saved: float
    decisions_unchanged: bool = False

    @property
    def sentence(self) -> str:
        """Return the change and its gain as a sentence."""
        return f"{self.change} would save {self.saved:.0%} of the time"


def helps(recording: Recording, path: Sequence[PathPart], decode_steps: int | None = None) -> list[Help]:
    """Find the changes that would save the most time, the best first.

    The recording is replayed with each change. The result is empty if no change saves much, or if the first two steps
    have too many tasks to replay.

    Args:
        recording: the whole run, or its first or last steps.
        path: the time on the recording's critical path, by kind of task, lane and reason to wait.
        decode_steps: number of decode steps of the whole run. By default the index of the last recorded step; since
            step 0 is the prefill, this is correct if the recording includes the end of the run.
    """
    steps = _first_steps(recording)
    if steps is None:
        return []
    if decode_steps is None:
        decode_steps = max(each.step for each in recording.slices)
    found = []
    decides = decides_as_it_goes(recording)
    with suppress(BadInput), no_garbage_collection():  # a recording that cannot be replayed has no answer
        before = _run_seconds(replayed_with(steps, Change()), decode_steps)
        for change, words in _candidates(steps, path).items():
            with suppress(BadInput):
                after = _run_seconds(replayed_with(steps, parse_change(change, steps)), decode_steps)
                found.append(
                    Help(
                        change=words,
                        command=f'explain TRACE --what-if "{change}"',
                        saved=1 - after / before,
                        decisions_unchanged=decides,
                    )
                )
    return best_helps(found)


def best_helps(found: Iterable[Help]) -> list[Help]:
    """Return the `MOST_HELPS` changes that save most, best first, without those that save less than `LEAST_SAVED`."""
    worth = [each for each in found if each.saved >= LEAST_SAVED]
    return sorted(worth, key=lambda each: -each.saved)[:MOST_HELPS]


def _candidates(recording: Recording, path: Sequence[PathPart]) -> dict[str, str]:
    """Return the changes that may save at least `LEAST_SAVED` of the run's time.

    The keys are the changes in the syntax of `what_if`, the values the changes in words.
    """
    words: dict[str, str] = {}
    most: dict[str, float] = {}
    for change, said, saved in _reliefs(recording, path):
        words[change] = said
        most[change] = most.get(change, 0.0) + saved
    return {change: words[change] for change, saved in most.items() if saved >= LEAST_SAVED}


def _reliefs(recording: Recording, path: Sequence[PathPart]) -> Iterator[tuple[str, str, float]]:
    """Yield, for each part of the critical path that a change could shorten, that change and the most it can save.

    Yields:
        Tuples (change in the syntax of `what_if`, change in words, largest share of the run's time that it can save).
        Twice the speed saves at most half of a part's time; all of the time between tasks may be saved.
    """
    names = {title: lane.name for lane, title in recording.titles.items()}
    links = {each.lane.name for each in recording.slices if each.task.type == "PageTransfer"}
    for part in path:
        lane = names.get(part.lane, "")
        if part.kind in BETWEEN:
            yield NO_HANDOVERS, "No time between tasks", part.share
        elif lane in links:
            yield f"link {lane} x2", f"{lane} at twice its rate", part.share / 2
        elif part.kind != WAIT:
            yield f"kernel {part.kind} x0.5", f"{part.kind} in half its time", part.share / 2


def _first_steps(recording: Recording) -> Recording | None:
    """Return the first steps of a recording, up to `MOST_TASKS` tasks, but at least `FEWEST_STEPS` after loading.

    None if that many steps have more than `TOO_MANY_TASKS` tasks, or if no step was recorded.
    """
    sizes: dict[int, int] = {}
    for each in recording.slices:
        sizes[each.step] = sizes.get(each.step, 0) + 1
    steps = sorted(sizes)
    total = dict(zip(steps, accumulate(sizes[step] for step in steps), strict=True))
    fewest = [step for step in steps if step >= 0][:FEWEST_STEPS]
    if not fewest or total[fewest[-1]] > TOO_MANY_TASKS:
        return None
    last = max([fewest[-1], *(step for step in steps if total[step] <= MOST_TASKS)])
    kept = [index for index, each in enumerate(recording.slices) if each.step <= last]
    return recording.part(kept)


def _run_seconds(replay: Recording, decode_steps: int) -> float:
    """Estimate the seconds of a whole run, without loading, from a replay of its first steps.

    The estimate is the replay's prefill plus `decode_steps` times the replay's mean decode step.
    """
    prefill, decode = 0.0, []
    for each in summarize(without_loading(replay)).steps:
        if phase_of(each.step) == "decode":
            decode.append(each.seconds)
        else:
            prefill += each.seconds
    return prefill + (decode_steps * sum(decode) / len(decode) if decode else 0.0)
