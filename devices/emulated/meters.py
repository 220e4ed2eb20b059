"""Meters of an emulation: they compare the time of real work with the time that the emulated machine takes."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter, process_time

from moesched.seams import Dilations, EmulatedLane, Emulation
from moesched.system.cores import usable_cores

REAL_SHARE = 1 / 3
"""Share of its dilated time that a task's real work may take without counting as an overrun."""


class LaneMeter:
    """Sums the times of one lane's tasks, and counts tasks whose real work took too long (see `EmulatedLane`)."""

    def __init__(self) -> None:
        self.worked = 0.0
        self.modelled = self.excess = self.overruns = self.late = 0

    def add(self, worked: float, modelled: int, taken: int) -> None:
        """Add a task's times, all in nanoseconds of the emulated machine.

        Args:
            worked: real time of the work on this machine, divided by the dilation (real seconds per emulated second).
            modelled: time that the cost model gives for the task.
            taken: time that the task occupied its lane.
        """
        self.worked += worked
        self.modelled += modelled
        self.excess += taken - modelled
        self.overruns += worked > REAL_SHARE * modelled
        self.late += worked > modelled

    def result(self) -> EmulatedLane:
        """Return how real work compares with the modelled times of the tasks that were added.

        At least one of these times must be more than 0.
        """
        return EmulatedLane(self.worked / self.modelled, self.overruns, self.late, self.excess / 1e9)


class Meters:
    """Measures an emulated run, from the construction of this object until `result`.

    Attributes:
        lanes: the meter of each lane (queue of tasks), by name.
    """

    def __init__(self, lanes: Iterable[str]) -> None:
        self.lanes = {name: LaneMeter() for name in lanes}
        self._since = perf_counter(), process_time()

    def result(self, dilations: Dilations) -> Emulation:
        """Summarise all lanes that had tasks, and the share of this machine's cores that the run kept busy.

        dilations: the dilations of the run, which become part of the summary.
        """
        wall, busy = self._since
        core_load = (process_time() - busy) / max(perf_counter() - wall, 1e-9) / usable_cores()
        lanes = {name: meter.result() for name, meter in self.lanes.items() if meter.modelled}
        return Emulation(dilations, core_load, lanes)
