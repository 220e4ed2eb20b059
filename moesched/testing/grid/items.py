"""The items of a check: trials, cells, and the shipped policies in each cell; each runs by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import structs

from moesched.errors import BadInput
from moesched.seams import Policy
from moesched.testing.grid.advice import Transfers, advice_of, used_lanes
from moesched.testing.grid.cells import Cell, simulate_cell
from moesched.testing.grid.faults import faults_of, reason_of, unfit_fault
from moesched.testing.grid.results import Advice, CellResult, Fault
from moesched.testing.grid.rivals import rivals_in
from moesched.testing.grid.trials import Trial, trials_of
from moesched.trace import Recorder, least_nanoseconds

CODE_OF_CHILD = "<string>:1"
"""The line that started the process of a check: the only one that is neither the framework's nor a library's."""


class Subject(msgspec.Struct, frozen=True):
    """The policy under test.

    Attributes:
        home: the line of its class, as file:line.
        whole: whether faults have the whole traceback.
    """

    name: str
    settings: dict[str, Any]
    home: str = ""
    whole: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an item.

    Attributes:
        skipped: whether it did not run, since earlier items made it needless.
        unfit: the fault to report if the policy fits in no item; None if its plan fits in this one.
        lanes: whether each lane was used.
        rivals: the seconds of the shipped policies, by name.
    """

    faults: list[Fault] = []
    advice: list[Advice] = []
    unfit: Fault | None = None
    cell: CellResult | None = None
    lanes: dict[str, bool] = {}
    rivals: dict[str, float] = {}
    skipped: bool = False


class Item(Protocol):
    """A part of the check."""

    @property
    def name(self) -> str:
        """The item's case as text."""

    def is_needed(self, earlier: Iterable[Outcome]) -> bool:
        """Test whether the item can find more than the items before it."""

    def run(self, subject: Subject) -> Outcome:
        """Run the policy, and collect what was found."""


class TrialItem(msgspec.Struct, frozen=True):
    """A small case on symbols. It takes milliseconds."""

    trial: Trial

    @property
    def name(self) -> str:
        """The trial's name."""
        return self.trial.name

    def is_needed(self, earlier: Iterable[Outcome]) -> bool:
        """Test that the same case with the machine's own durations had no fault."""
        case = self.trial.case.name
        return not any(fault.case == case for each in earlier for fault in each.faults)

    def run(self, subject: Subject) -> Outcome:
        """Run the trial, and collect its faults."""

        def run() -> None:
            self.trial.run(subject.name, subject.settings)

        try:
            return Outcome(faults=faults_of(run, self.name, subject.home, whole=subject.whole))
        except BadInput as error:
            return Outcome(unfit=unfit_fault(error, self.name, subject.home))


class CellItem(msgspec.Struct, frozen=True):
    """The policy in a cell."""

    cell: Cell

    @property
    def name(self) -> str:
        """The cell's name."""
        return self.cell.name

    def is_needed(self, earlier: Iterable[Outcome]) -> bool:
        """True, since results are wanted for every cell."""
        return True

    def run(self, subject: Subject) -> Outcome:
        """Simulate the policy: its time, the lower bound of its tasks, and advice."""
        outcome = Outcome()

        def run() -> None:
            nonlocal outcome
            outcome = _in_cell(self.cell, subject)

        try:
            faults = faults_of(run, self.name, subject.home, whole=subject.whole)
        except BadInput as error:
            result = CellResult(**structs.asdict(self.cell), problem=f"does not fit: {reason_of(error)}")
            return Outcome(cell=result, unfit=unfit_fault(error, self.name, subject.home))
        if faults:
            result = CellResult(**structs.asdict(self.cell), problem=f"{faults[0].line}: {faults[0].message}")
            return Outcome(cell=result, faults=faults)
        return outcome


class RivalsItem(msgspec.Struct, frozen=True):
    """The shipped policies in a cell."""

    cell: Cell

    @property
    def name(self) -> str:
        """The cell's name, and that the shipped policies run."""
        return f"rank in {self.cell.name}"

    def is_needed(self, earlier: Iterable[Outcome]) -> bool:
        """Test whether the policy under test has a time in this cell to compare with."""
        return any(each.of(self.cell) and each.seconds for outcome in earlier if (each := outcome.cell))

    def run(self, subject: Subject) -> Outcome:
        """Simulate the shipped policies, and collect their times."""
        return Outcome(rivals=rivals_in(self.cell))


def items_of(policy: type[Policy], cells: Sequence[Cell]) -> list[Item]:
    """All items of a check, in the order in which they run."""
    trials: list[Item] = [TrialItem(trial) for trial in trials_of(policy)]
    return [*trials, *map(CellItem, cells), *map(RivalsItem, cells)]


def _in_cell(cell: Cell, subject: Subject) -> Outcome:
    transfers, recorder = Transfers(), Recorder()
    seen = simulate_cell(cell, subject.name, subject.settings, observers=[transfers], recorder=recorder)
    recording = recorder.recording()
    prefill = least_nanoseconds(recording, *seen.run.prefill)
    step = least_nanoseconds(recording, *seen.run.decode) / seen.run.steps
    bound = (prefill + (seen.plan.batch.new_tokens - 1) * step) / 1e9
    result = CellResult(**structs.asdict(cell), seconds=seen.seconds, lower_bound_seconds=bound)
    return Outcome(
        cell=result,
        advice=[_with_line(each, subject) for each in advice_of(cell.name, seen.plan, transfers.all)],
        lanes=used_lanes(recording),
    )


def _with_line(advice: Advice, subject: Subject) -> Advice:
    """The advice with the line of the policy's class where it has none, as in installed packages."""
    return structs.replace(advice, line=subject.home) if advice.line in ("", CODE_OF_CHILD) else advice
