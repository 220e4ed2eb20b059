"""Observers of runs, and the clean-up at a run's end, for fixed batches and for continuous batching."""

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
    """The parts of one rank's run that observers and the clean-up at its end need: plan, engine, run state."""

    @property
    def plan(self) -> Plan:
        """The rank's plan."""

    @property
    def engine(self) -> Engine:
        """The rank's engine."""

    @property
    def run_state(self) -> RunState:
        """The state that all steps of the rank's run share."""


def observers_of(
    runs: Sequence[Watched], observers: Sequence[Observer], recorder: Recorder | LastSteps | None
) -> Sequence[Observer]:
    """Return the observers for the driver of several ranks.

    Args:
        runs: each rank's run, the first rank's first.
        observers: called with the tasks of the first rank only.
        recorder: records the tasks of all ranks; None for no recorder.
    """
    if len(runs) > 1:
        observers = [OfLanes(observer, runs[0].engine.lanes) for observer in observers]
    if recorder is None:
        return observers
    for each in runs:
        recorder.watch(each.engine, each.plan.memories, each.plan.weights.pools)
    return [*observers, recorder]


@contextmanager
def closed_at_end(runs: Sequence[Watched]) -> Iterator[None]:
    """Check runs that have a `CheckedEngine`, and close all run states at the end of the context.

    A closed run state (`RunState.close`) holds no tasks or stored errors. Errors raised in the context go on.
    """
    with ExitStack() as opened:
        for run in runs:
            opened.enter_context(closing(run.run_state))
            opened.enter_context(watching(run.run_state))
        yield
