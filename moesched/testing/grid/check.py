"""`check_on_grid`: starts a child process that runs all items of a check, and makes a report of their outcomes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from signal import Signals
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.system.children import tied_child
from moesched.testing.grid.advice import advice_of_lanes
from moesched.testing.grid.cells import Cell, cells_of
from moesched.testing.grid.child import Began, ChildOrder, Message, Opened, Refused, command, message_in
from moesched.testing.grid.faults import UNKNOWN, begins_traceback, endless_line
from moesched.testing.grid.items import Outcome, Subject
from moesched.testing.grid.results import Advice, CellResult, Fault, GridReport, merged, rank_among

LIMIT_SECONDS = 60.0
LEAST_PATIENCE = 1.0
"""Seconds that a small case may take; a sixth of the time limit if that is more."""

Progress = Callable[[int, int, str], object]
"""Progress callback; its arguments are the number of items done, the number of all items, and the next item's name."""


def check_on_grid(
    policy: str,
    settings: Mapping[str, Any] | None = None,
    *,
    cells: Sequence[Cell] | None = None,
    limit: float = LIMIT_SECONDS,
    whole_traceback: bool = False,
    on_progress: Progress = lambda done, total, what: None,
) -> GridReport:
    """Look for a policy's faults in small cases, and compare it with the shipped policies in cells of a grid.

    All items of the check (small cases, cells, and the ranking of policies in each cell) run in a child process, which
    is killed if a small case does not end, or at the time limit.

    Args:
        policy: a name of `moesched list policies`, or file.py:Class, or module:Class.
        settings: the policy's settings by name; None for the defaults.
        cells: the cells of the grid; None for the cells of `cells_of()`.
        limit: seconds after which the check ends; the report then lists the remaining items as unchecked.
        whole_traceback: whether faults have the whole traceback, not only the policy's own frames.
        on_progress: called with (items done, all items, name of the item that begins).

    Raises:
        BadInput: the policy cannot be loaded, or does not take the settings.
    """
    started = time.monotonic()
    subject = Subject(policy, dict(settings or {}), whole=whole_traceback)
    chosen = cells_of() if cells is None else list(cells)
    run = ChildRun(ChildOrder(subject, chosen, max(LEAST_PATIENCE, limit / 6), limit), on_progress)
    run.wait()
    return run.report(time.monotonic() - started)


class ChildRun:
    """Runs a check's child process, and collects the outcomes of items that the child reports.

    Args:
        order: the child's work: the policy, the cells and the time limits.
        on_progress: called with (items done, all items, name of the item that begins).
    """

    def __init__(self, order: ChildOrder, on_progress: Progress = lambda done, total, what: None) -> None:
        self._order = order
        self._on_progress = on_progress
        self._class_line = UNKNOWN
        self._names: list[str] = []
        self._outcomes: dict[int, Outcome] = {}
        self._begun: Began | None = None
        self._fatal: list[Fault] = []
        self._reason = f"the limit of {order.limit:g} s was over"

    def wait(self) -> None:
        """Start the child process, collect its outcomes, and return when it has ended.

        Raises:
            BadInput: the child cannot load the policy, or the policy does not take the settings.
        """
        with tied_child(command(self._order), stdout=subprocess.PIPE) as child:
            assert child.stdout is not None, "it has a pipe"
            try:
                busy_at = self._read(child.stdout)
            finally:
                child.kill()
                code = child.wait()
        if self._begun is not None or not self._names:
            self._ended_early(busy_at, code)

    def report(self, seconds: float) -> GridReport:
        """Return the report of all outcomes.

        seconds: duration of the check.
        """
        count = len(self._names) - len(self._order.cells)
        unchecked = [name for number, name in enumerate(self._names) if number not in self._outcomes]
        own = [each for number, each in sorted(self._outcomes.items()) if number < count and not each.skipped]
        unfit = [each.unfit for each in own if each.unfit is not None]
        nowhere = unfit[:1] if len(unfit) == len(own) else []
        lanes = [(self._names[number], each.lanes) for number, each in sorted(self._outcomes.items())]
        advice: list[Advice] = [each for outcome in own for each in outcome.advice]
        trials = [each for each in own if each.cell is None]
        return GridReport(
            policy=self._order.subject.name,
            faults=merged([*self._fatal, *(fault for each in own for fault in each.faults), *nowhere]),
            advice=merged([*advice, *advice_of_lanes([each for each in lanes if each[1]])]),
            cases=list(self._cell_results(count - len(self._order.cells))),
            trials=len(trials),
            unfit=sum(each.unfit is not None for each in trials),
            unchecked=unchecked,
            reason=self._reason if unchecked else "",
            seconds=seconds,
        )

    def _read(self, lines: Iterable[bytes]) -> str | None:
        """Collect outcomes from the child's messages until the messages end or an item takes too long.

        lines: the child's output.

        Returns:
            The policy's line at which an item took too long, as file:line; None if no item took too long.
        """
        traceback: list[str] = []
        for line in lines:
            message = message_in(line)
            if message is not None:
                traceback.clear()
                self._take(message)
                continue
            text = line.decode(errors="replace").rstrip()
            if traceback and begins_traceback(text):
                busy_at = endless_line(traceback, self._class_line)
                if busy_at is not None:
                    return busy_at
                traceback.clear()
            traceback.append(text)
        return None

    def _take(self, message: Message) -> None:
        if isinstance(message, Refused):
            raise BadInput(message.why)
        if isinstance(message, Opened):
            self._class_line, self._names = message.class_line, message.names
        elif isinstance(message, Began):
            self._begun = message
            self._on_progress(message.item, len(self._names), self._names[message.item])
        else:
            self._outcomes[message.item] = message.outcome
            self._begun = None

    def _ended_early(self, busy_at: str | None, code: int) -> None:
        """Record the reason why the child's last item did not end; if it is the policy's fault, also record the fault.

        Args:
            busy_at: the policy's line at which the item took too long; None if the process ended by itself.
            code: the exit code of the process.
        """
        begun = self._begun
        case = self._names[begun.item] if begun is not None else "loading the policy"
        self._reason = (
            f"the process ended in {case}" if busy_at is None else f"{case} still ran, at {busy_at}"
        )
        if begun is not None and begun.item >= len(self._names) - len(self._order.cells):
            return  # only ranks are missing, for which other policies run
        if busy_at is None:
            ended = f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
            message = f"the policy ended the process, {ended}"
            self._fatal.append(Fault(line=self._class_line, message=message, case=case))
        elif begun is None or begun.quick:
            seconds = self._order.loading if begun is None else begun.seconds
            message = f"does not end: still running after {seconds:.3g} s"
            self._fatal.append(Fault(line=busy_at, message=message, case=case))

    def _cell_results(self, first: int) -> Iterator[CellResult]:
        """Yield the result of each cell, with the policy's rank among the shipped policies.

        first: index of the first cell's item among all items.
        """
        cells = self._order.cells
        for number, cell in enumerate(cells, first):
            outcome = self._outcomes.get(number)
            rivals = self._outcomes.get(number + len(cells))
            if outcome is None or outcome.cell is None:
                yield CellResult(**structs.asdict(cell), problem=f"not checked: {self._reason}")
            else:
                yield outcome.cell if rivals is None else self._ranked(outcome.cell, rivals.rivals)

    def _ranked(self, cell: CellResult, rivals: Mapping[str, float]) -> CellResult:
        subject = self._order.subject
        others = [seconds for name, seconds in rivals.items() if name != subject.name or subject.settings]
        fastest = min(rivals, key=rivals.__getitem__, default=None)
        if fastest is not None:
            cell = replace(cell, fastest=fastest, fastest_seconds=rivals[fastest])
        if cell.seconds is None:
            return cell
        return replace(cell, rank=rank_among(cell.seconds, others), fitting=len(others) + 1)
