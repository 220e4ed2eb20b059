"""Output in the cells of notebooks: a line of progress, and the HTML of values."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import Any

SECONDS_BETWEEN = 0.25
"""Least time between two updates of a line."""

PATIENCE_SECONDS = 1.0
"""Seconds before a line of progress appears; most predictions end earlier and show none."""

DRAWINGS = "moesched.report.cell_drawings"
"""The module that draws values as HTML, loaded when the first value is shown."""


def html_of(value: object) -> str:
    """Return the HTML with which a notebook shows a value, as the module named in `DRAWINGS` draws it."""
    drawn: str = import_module(DRAWINGS).drawn(value)
    return drawn


def in_a_notebook() -> bool:
    """Test whether a notebook's kernel runs this program."""
    kernels = sys.modules.get("ipykernel.kernelapp")
    return kernels is not None and bool(kernels.IPKernelApp.initialized())


def counted_in_cell(what: str) -> Callable[[float, float], object] | None:
    """Return a function of (done, total) that shows some work's progress in a notebook's cell; None without a notebook.

    Args:
        what: name of the work, shown beside the progress bar.
    """
    if not in_a_notebook():
        return None
    line = CellLine(PATIENCE_SECONDS)
    return lambda done, total: line.show(what, done, total)


def named_in_cell() -> Callable[[str], object] | None:
    """Return a function that takes a stage's name and shows it in a notebook's cell; None outside of notebooks."""
    return CellLine(PATIENCE_SECONDS).show if in_a_notebook() else None


class CellLine:
    """A line in a notebook's cell that shows the progress of some work; its methods may be called from any thread.

    Args:
        patience: seconds before the line appears.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self._handle: Any = None
        self._next = time.monotonic() + patience
        self._lock = threading.Lock()

    def show(self, what: str, done: float = 0, total: float | None = None) -> None:
        """Show the work's name, with a progress bar if `total` is given.

        A call within `SECONDS_BETWEEN` of the last update has no effect.

        Args:
            what: name of the work.
            done: amount that is done, in the unit of `total`.
            total: amount of the whole work; None if it is not known.
        """
        now = time.monotonic()
        if now < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = now + SECONDS_BETWEEN
            bar = f'<progress value="{done:g}" max="{total:g}"></progress> ' if total else ""
            self._write(f"{bar}{escape(what)}")
        finally:
            self._lock.release()

    def end(self, what: str) -> None:
        """Replace the text of the line, if it has appeared, by `what`; a later call of `show` takes effect at once."""
        with self._lock:
            if self._handle is not None:
                self._write(escape(what))
            self._next = 0.0

    def _write(self, html: str) -> None:
        from IPython.display import HTML, display

        shown = HTML(html)
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)
