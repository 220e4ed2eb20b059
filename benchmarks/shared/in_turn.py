"""Runs of several things in turn, with each other and with calibration; disturbed ones are done again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

from benchmarks.record.benchmark import progress
from moesched.calibration.calibrate import calibrate_machine
from moesched.calibration.other_load import OtherLoad
from moesched.machines import Machine

MOST_OTHER_CORES = 0.1
"""Cores that others may keep busy during a run that is not repeated."""

K = TypeVar("K", bound=Hashable)
Figures = dict[str, float]


class Run(NamedTuple):
    """Figures of a run, and the cores that others kept busy meanwhile."""

    others: float
    figures: Figures


class InTurn(Generic[K]):
    """Runs of several things in turn: all have their first run before any has its second one.

    Args:
        measures: makes a run of each.
        repeats: how many undisturbed runs of each are wanted.
    """

    def __init__(
        self,
        measures: Mapping[K, Callable[[], Figures]],
        repeats: int,
    ) -> None:
        self._measures = measures
        self._repeats = repeats
        self._turns = 0
        self._runs: dict[K, list[Run]] = {name: [] for name in measures}

    def turn(self) -> None:
        """Run each that has not had as many undisturbed runs as turns, or as are wanted."""
        self._turns += 1
        for name, measure in self._measures.items():
            undisturbed = sum(run.others <= MOST_OTHER_CORES for run in self._runs[name])
            if undisturbed < min(self._turns, self._repeats):
                load = OtherLoad()
                figures = measure()
                self._runs[name].append(Run(load.cores(), figures))

    def up_to(self, most: int) -> dict[K, list[Run]]:
        """All wanted undisturbed runs of each, as far as `most` turns give them; the least disturbed come first."""
        while self._turns < most:
            self.turn()
        return {
            name: sorted(each, key=lambda run: run.others)[: self._repeats]
            for name, each in self._runs.items()
        }


def calibrate_in_turn(runs: InTurn[K], turns: int) -> Machine:
    """Calibrate the machine, with turns of the runs in between: both see the same minutes of it."""
    taken = 0

    def between(done: int, steps: int) -> None:
        nonlocal taken
        if done * turns >= (taken + 1) * steps:
            taken += 1
            progress.print(f"calibrated {done} of {steps}")
            runs.turn()

    return calibrate_machine(progress=between, thorough=True)
