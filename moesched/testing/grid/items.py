"""Items, the parts of a check: a small case, a cell (model, machine, batch size), or the shipped policies in a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
"""File and line of the code that starts the child process; it could be mistaken for a line of the policy."""


class Subject(msgspec.Struct, frozen=True):
    """The policy that is checked.

    Attributes:
        name: the policy's name, or file.py:Class, or module:Class.
        settings: the policy's settings by name.
        class_line: the first line of the policy's class, as file:line; empty until the class is loaded.
        whole: whether faults have the whole traceback.
    """

    name: str
    settings: dict[str, Any]
    class_line: str = ""
    whole: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one item.

    Attributes:
        unfit: the fault if the policy's plan does not fit in this item; only reported if the plan fits nowhere. None if
            the plan fits.
        cell: the policy's result in a cell; None for other items.
        lanes: whether each lane was used, by the lane's name.
        rivals: predicted seconds of the shipped policies, by name; empty for other items.
        skipped: whether the item was not run, since earlier outcomes made it unnecessary.
    """

    faults: list[Fault] = []
    advice: list[Advice] = []
    unfit: Fault | None = None
    cell: CellResult | None = None
    lanes: dict[str, bool] = {}
    rivals: dict[str, float] = {}
    skipped: bool = False


class Item(NamedTuple):
    """A part of a check that runs by itself.

    Attributes:
        name: the case as text.
        run: runs the policy, and returns the results.
        is_needed: takes the outcomes of earlier items, and returns whether this item can find anything new.
        small: whether the item is a small case, which takes milliseconds.
    """

    name: str
    run: Callable[[Subject], Outcome]
    is_needed: Callable[[Iterable[Outcome]], bool] = lambda earlier: True
    small: bool = False


def trial_item(trial: Trial) -> Item:
    """Make the item that runs the policy in a small case, to find faults.

    The item is not needed if an earlier item found a fault in the same case on the clock "virtual", with the machine's
    own durations.
    """

    def is_needed(earlier: Iterable[Outcome]) -> bool:
        return not any(fault.case == trial.case.name for each in earlier for fault in each.faults)

    def run(subject: Subject) -> Outcome:
        def run_it() -> None:
            trial.run(subject.name, subject.settings)

        try:
            return Outcome(faults=faults_of(run_it, trial.name, subject.class_line, whole=subject.whole))
        except BadInput as error:
            return Outcome(unfit=unfit_fault(error, trial.name, subject.class_line))

    return Item(trial.name, run, is_needed, small=True)


def cell_item(cell: Cell) -> Item:
    """Make the item that simulates the policy in a cell.

    Its outcome has the policy's predicted time, a lower bound of that time, and advice.
    """

    def run(subject: Subject) -> Outcome:
        outcome = Outcome()

        def run_it() -> None:
            nonlocal outcome
            outcome = _in_cell(cell, subject)

        try:
            faults = faults_of(run_it, cell.name, subject.class_line, whole=subject.whole)
        except BadInput as error:
            result = CellResult(**structs.asdict(cell), problem=f"does not fit: {reason_of(error)}")
            return Outcome(cell=result, unfit=unfit_fault(error, cell.name, subject.class_line))
        if faults:
            result = CellResult(**structs.asdict(cell), problem=f"{faults[0].line}: {faults[0].message}")
            return Outcome(cell=result, faults=faults)
        return outcome

    return Item(cell.name, run)


def rivals_item(cell: Cell) -> Item:
    """Make the item that predicts the times of the shipped policies in a cell.

    The item is not needed if the policy under check has no predicted time in this cell.
    """

    def is_needed(earlier: Iterable[Outcome]) -> bool:
        return any(each.of(cell) and each.seconds for outcome in earlier if (each := outcome.cell))

    return Item(f"rank in {cell.name}", lambda subject: Outcome(rivals=rivals_in(cell)), is_needed)


def items_of(policy: type[Policy], cells: Sequence[Cell]) -> list[Item]:
    """Return all items of a check of a policy in these cells, in the order in which they run."""
    return [*map(trial_item, trials_of(policy)), *map(cell_item, cells), *map(rivals_item, cells)]


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
    """Return the advice, with the line of the policy's class if the advice names no line of the policy."""
    return structs.replace(advice, line=subject.class_line) if advice.line in ("", CODE_OF_CHILD) else advice
