"""Runs of several things in turn, with each other and with calibration; disturbed ones are done again.

A run is disturbed if other processes took more than a tenth of a core, or if a rate, such as that of memory, before it,
after it and at calibration differed by more than a tenth. Only these decide which runs are kept and which are repeated,
never a run's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median_low
from typing import Generic, NamedTuple, TypeVar

from benchmarks.record.benchmark import progress
from benchmarks.shared.memory_rate import at_one_rate, memory_gbs
from moesched.calibration.calibrate import calibrate_machine
from moesched.calibration.timing import MOST_OTHER_CORES, OtherLoad, Others
from moesched.machines import Machine

MOST_TURNS = 3
"""As a multiple of the runs that are wanted: no more are made, disturbed or not."""
MOST_CALIBRATIONS = 3
LEAST_SHARE_AT_ONE_RATE = 0.8
"""Of the readings of memory during a calibration that is not made again."""

K = TypeVar("K", bound=Hashable)
Figures = dict[str, float]
Rates = Mapping[str, Sequence[float]]
"""By name with its unit, such as "memory_gbs", readings of a rate."""


class Run(NamedTuple):
    """Figures of a run, the cores that others kept busy meanwhile, and rates before, after and at the turn's begin."""

    others: float
    figures: Figures
    rates: Mapping[str, tuple[float, ...]] = {}

    def at_rates_of(self, calibration_rates: Rates) -> bool:
        """Test whether each of the run's rates was one, that of the calibration if there was one."""
        middle = {name: [median_low(found)] for name, found in calibration_rates.items() if found}
        return all(at_one_rate([*found, *middle.get(name, ())]) for name, found in self.rates.items())


class Taken(NamedTuple):
    """Runs of one thing: those whose figures count, and those in whose place others were made."""

    kept: list[Run]
    repeated: list[Run]


def taken_of(runs: Sequence[Run], wanted: int, calibration_rates: Rates) -> Taken:
    """Those at the calibration's rates are kept first, then those that others disturbed least, then the last ones."""

    def order(number: int) -> tuple[bool, float, int]:
        others, elsewhere = runs[number].others, not runs[number].at_rates_of(calibration_rates)
        return elsewhere, max(others, MOST_OTHER_CORES), -number

    ordered = [runs[number] for number in sorted(range(len(runs)), key=order)]
    return Taken(ordered[:wanted], ordered[wanted:])


class InTurn(Generic[K]):
    """Runs of several things in turn: all have their first run before any has its second one.

    Args:
        measures: makes a run of each.
        repeats: how many undisturbed runs of each are wanted.
        rates: by name, what measures each rate that times depend on.
        watch: begins to measure the load of others.
        begin: called before the runs of each turn; returns readings of rates, such as those at a calibration, with
            which the runs' own readings are compared.

    Attributes:
        calibration_rates: rates during the calibration; none before it.
    """

    def __init__(
        self,
        measures: Mapping[K, Callable[[], Figures]],
        repeats: int,
        rates: Mapping[str, Callable[[], float]] = {"memory_gbs": memory_gbs},
        watch: Callable[[], Others] = OtherLoad,
        begin: Callable[[], Rates] = dict,
    ) -> None:
        self.calibration_rates: dict[str, list[float]] = {}
        self._measures = measures
        self._repeats = repeats
        self._rates, self._watch, self._begin = rates, watch, begin
        self._turns = 0
        self._runs: dict[K, list[Run]] = {name: [] for name in measures}

    def turn(self) -> None:
        """Run each that has not had as many undisturbed runs as turns, or as are wanted."""
        self._turns += 1
        wanted = min(self._turns, self._repeats)
        due = [name for name, runs in self._runs.items() if sum(map(self._undisturbed, runs)) < wanted]
        at_begin = self._begin() if due else {}
        for name in due:
            self._runs[name].append(self._run(self._measures[name], at_begin))

    def taken(self) -> dict[K, Taken]:
        """All wanted undisturbed runs of each, as far as the turns that are left give them.

        Ctrl-C ends the turns; once each has run, the runs so far count.
        """
        try:
            while self._turns < MOST_TURNS * self._repeats:
                self.turn()
        except KeyboardInterrupt:
            if not all(self._runs.values()):
                raise
            progress.print("interrupted: the runs so far count")
        return {
            name: taken_of(runs, self._repeats, self.calibration_rates) for name, runs in self._runs.items()
        }

    def rates(self) -> dict[str, float]:
        """The rates now."""
        return {name: measured() for name, measured in self._rates.items()}

    def _run(self, measure: Callable[[], Figures], at_begin: Rates) -> Run:
        before, load = self.rates(), self._watch()
        figures = measure()
        cores, after = load.cores(), self.rates()
        rates = {name: (rate, after[name], *at_begin.get(name, ())) for name, rate in before.items()}
        return Run(cores, figures, rates)

    def _undisturbed(self, run: Run) -> bool:
        return run.others <= MOST_OTHER_CORES and run.at_rates_of(self.calibration_rates)


class Calibration(NamedTuple):
    """A calibrated machine, and the rates meanwhile, if they were measured."""

    machine: Machine
    rates: dict[str, list[float]]


def calibrate_in_turn(runs: InTurn[K], turns: int) -> Machine:
    """Calibrate the machine, with turns of the runs in between: both see the same minutes of it.

    If a rate changed meanwhile, the calibration is made again.
    """
    calibration = steadiest(lambda: _calibrated(runs, turns), lambda: _calibrated(runs, 0))
    runs.calibration_rates = calibration.rates
    return calibration.machine


def share_at_one_rate(rates: Rates) -> float:
    """The least share of a rate's readings that are its middle one; 1.0 if there are none."""
    shares = [1.0]
    for readings in rates.values():
        middle = median_low(readings)
        shares.append(sum(at_one_rate([each, middle]) for each in readings) / len(readings))
    return min(shares)


def steadiest(first: Callable[[], Calibration], again: Callable[[], Calibration]) -> Calibration:
    """The first calibration, or another if rates changed: the one that saw the largest share of one rate."""
    found = [first()]
    while len(found) < MOST_CALIBRATIONS and share_at_one_rate(found[-1].rates) < LEAST_SHARE_AT_ONE_RATE:
        progress.print("rates changed meanwhile: calibrating again")
        found.append(again())
    return max(found, key=lambda each: share_at_one_rate(each.rates))


def _calibrated(runs: InTurn[K], turns: int) -> Calibration:
    taken = 0
    rates: dict[str, list[float]] = {}

    def between(done: int, steps: int) -> None:
        nonlocal taken
        for name, rate in runs.rates().items():
            rates.setdefault(name, []).append(rate)
        if done * turns >= (taken + 1) * steps:
            taken += 1
            progress.print(f"calibrated {done} of {steps}")
            runs.turn()

    return Calibration(calibrate_machine(progress=between, thorough=True), rates)
