"""Prepares and runs a sweep: checks all simulations, runs those without a result, and keeps each result at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.sweeps.axes import PRICES, Sweep, option_of
from moesched.sweeps.figures import MachineFacts
from moesched.sweeps.found import Finder, SweepObjects, require_sensible
from moesched.sweeps.line import Line
from moesched.sweeps.points import points_of, policies_of
from moesched.sweeps.store import Store
from moesched.sweeps.workers import Point, Workers
from moesched.system.cores import usable_cores
from moesched.system.signals import stopped_by

TRIED_FIRST = 24
"""Number of points from all parts of the sweep that run first; if all of them fail, the sweep ends."""


class Prepared(NamedTuple):
    """A sweep whose values are checked and whose objects are loaded.

    Attributes:
        sweep: the axes and prices.
        points: all simulations, as pairs of key and inputs.
        found: the objects that the simulations name.
    """

    sweep: Sweep
    points: list[Point]
    found: SweepObjects

    @property
    def figures(self) -> MachineFacts:
        """The facts about machines (accelerators' memories, prices) from which simulations' figures are computed."""
        fast = {inputs: machine.accelerator.memory for (inputs, *_), machine in self.found.machines.items()}
        return MachineFacts(fast, self.sweep.prices)


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sweep, whether all of its simulations are done or not.

    Attributes:
        points: number of simulations.
        reused: number of simulations whose results the file already had.
        others: number of lines of other sweeps in the file.
        interrupted: whether a signal ended the sweep.
        hopeless: whether the sweep ended early, since all simulations that ran failed.
        lines: the results of the simulations that are done, in the order of the sweep.
    """

    points: int
    reused: int
    others: int
    interrupted: bool
    hopeless: bool
    lines: list[Line]

    @property
    def failures(self) -> list[Line]:
        """The lines of the simulations that failed."""
        return [line for line in self.lines if line.failure is not None]

    @property
    def all_failed(self) -> bool:
        """True if no simulation succeeded."""
        return len(self.failures) == len(self.lines)


def prepare(sweep: Sweep) -> Prepared:
    """Find all objects that a sweep names, and check all values.

    Raises:
        BadInput: an object cannot be found, or a value cannot be used.
    """
    finder = Finder(policies_of(sweep.axes))
    inputs = points_of(sweep.axes, finder.policies)
    for each in inputs:
        require_sensible(each)
    points = [(finder.key(each), each) for each in inputs]
    finder.require_budgets(name.partition(".")[2] for name in sweep.axes if name.startswith("budgets."))
    machines = sweep.axes["machine"]
    for machine in sweep.prices:
        if machine not in machines:
            raise BadInput(
                f"{option_of(PRICES)} names {machine!r}: the sweep's machines are {', '.join(machines)}"
            )
    return Prepared(sweep, points, finder.found)


def missing_points(prepared: Prepared, store: Store, *, retry: bool = False) -> list[Point]:
    """Return the simulations that the file of results lacks; with `retry`, also those that failed."""
    known = {key for key, line in store.lines.items() if not (retry and line.failure is not None)}
    return [point for point in prepared.points if point[0] not in known]


def run_sweep(
    prepared: Prepared,
    store: Store,
    *,
    workers: int | None = None,
    retry: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    first_failure: Callable[[Line], None] = lambda line: None,
) -> SweepResult:
    """Run the simulations that the file of results lacks; the sweep ends early if the first `TRIED_FIRST` all fail.

    Args:
        workers: number of processes; by default one for each core.
        retry: whether simulations that failed run again.
        progress: called with (number of simulations done or already in the file, number of all simulations).
        first_failure: called with the line of the first simulation that fails.

    Raises:
        BadInput: a result cannot be written; earlier results are in the file.
    """
    points = prepared.points
    missing = _spread_first(missing_points(prepared, store, retry=retry))
    failed, hopeless = 0, False
    reused = done = len(points) - len(missing)
    progress(done, len(points))
    with Workers(prepared.found, workers or usable_cores()) as pool:
        with stopped_by(pool.stop):
            for encoded in pool.lines(missing):
                line = store.append(encoded)
                done += 1
                progress(done, len(points))
                if line.failure is None:
                    continue
                failed += 1
                if failed == 1:
                    first_failure(line)
                hopeless = failed == done - reused == TRIED_FIRST < len(missing)
                if hopeless:
                    break
    keys = [key for key, _ in points]
    return SweepResult(
        points=len(points),
        reused=reused,
        others=len(store.lines.keys() - set(keys)),
        interrupted=done < len(points) and not hopeless,
        hopeless=hopeless,
        lines=[store.lines[key] for key in keys if key in store.lines],
    )


def _spread_first(points: list[Point]) -> list[Point]:
    """Return all simulations, a few from evenly spread places of the list first."""
    first = range(0, len(points), max(1, len(points) // TRIED_FIRST))[:TRIED_FIRST]
    return [points[i] for i in first] + [point for i, point in enumerate(points) if i not in first]
