"""The observers of runs, and the end of runs: for batches and for requests that join and leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol

from moesched.drivers.validation import watching
from moesched.engine import Engine
from moesched.runs.ranks import OfLanes
from moesched.seams import Observer
from moesched.steps.plan import Plan
from moesched.steps.run_state import RunState
from moesched.trace import LastSteps, Recorder


class Watched(Protocol):
    """The parts of one rank's run that observers, and the end of the run, have to do with."""

    @property
    def plan(self) -> Plan:
        """The rank's plan."""

    @property
    def engine(self) -> Engine:
        """The rank's engine."""

    @property
    def run_state(self) -> RunState:
        """The state that its tasks share."""


def observers_of(
    runs: Sequence[Watched], observers: Sequence[Observer], recorder: Recorder | LastSteps | None
) -> Sequence[Observer]:
    """The observers for the driver: `observers` see the first rank's tasks only, the recorder those of all ranks."""
    if len(runs) > 1:
        observers = [OfLanes(observer, runs[0].engine.lanes) for observer in observers]
    if recorder is None:
        return observers
    for each in runs:
        recorder.watch(each.engine, each.plan.memories, each.plan.weights.pools)
    return [*observers, recorder]


@contextmanager
def closed_at_end(runs: Sequence[Watched]) -> Iterator[None]:
    """End each run's checks of validation mode, and drop its tasks, at the end of the context."""
    with ExitStack() as opened:
        for run in runs:
            opened.enter_context(closing(run.run_state))
            opened.enter_context(watching(run.run_state))
        yield
