"""Progress of a run in the cell of a notebook: loading, prefill, then tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moesched.errors import BadInput
from moesched.runs.listeners import Listener
from moesched.steps.plan import Plan
from moesched.system.cells import CellLine, in_a_notebook
from moesched.system.plain_text import shown
from moesched.tasks import Task

if TYPE_CHECKING:
    from moesched.drivers.replay import ReplayedRun


def listener_or_cell(given: Listener | None, *, patience: float = 0.0) -> Listener:
    """Return the given listener; if it is None, a `CellProgress` in a notebook, elsewhere a listener that does nothing.

    patience: seconds before the cell shows anything.
    """
    if isinstance(given, Listener):
        return given
    if given is not None:
        raise BadInput(
            f"listener is {shown(given)}: give an object of a class derived from moesched.Listener"
        )
    return CellProgress(patience) if in_a_notebook() else Listener()


class CellProgress(Listener):
    """Shows a run's progress in the cell that started it.

    Args:
        patience: seconds before it shows anything.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self._line = CellLine(patience)
        self._pages = self._loaded = self._tokens = self._most = 0

    def preparing(self, what: str, done: float, total: float) -> None:
        """Show that the device has done `done` of `total` units of the preparation named `what`."""
        self._line.show(what, done, total)

    def planned(self, plan: Plan) -> None:
        """Show that a batch is planned, and count its pages and tokens from 0."""
        self._pages, self._loaded = sum(len(kept.slots) for kept in plan.weights.resident), 0
        self._most = len(plan.batch.prompts) * plan.batch.new_tokens
        self._tokens = 0
        self._line.show("planned")

    def loading(self, done: int, total: int) -> None:
        """Show that all nodes together have loaded `done` of `total` pages."""
        self._line.show("loading weights", done, total)

    def ended(self, task: Task) -> None:
        """Count a page that a task has loaded; other tasks are ignored."""
        if task.verb == "load":
            self._loaded += 1
            self._line.show("loading weights", self._loaded, self._pages)

    def replayed(self, run: ReplayedRun) -> None:
        """Ignore a replay, which is over before anything can be shown."""

    def generated(self, request: int, token: int, text: str) -> None:
        """Count a generated token."""
        self._tokens += 1
        self._line.show(f"{self._tokens:,} of at most {self._most:,} tokens", self._tokens, self._most)

    def estimating(self, done: int, total: int) -> None:
        """Show that `done` of `total` simulations for the range of a prediction are over."""
        self._line.show("estimating the band", done, total)

    def writing(self, trace: Path) -> None:
        """Show the name of the trace file that is being written."""
        self._line.show(f"writing {trace}")

    def ran(self) -> None:
        """Show the end of the batch."""
        self._line.end(f"{self._tokens:,} tokens" if self._tokens else "done")
