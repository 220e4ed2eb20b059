"""Output of commands: JSON, text, and a progress bar for commands that take longer than a second."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from moesched.system.plain_text import plain_text
from moesched.system.standard_output import command_output

if TYPE_CHECKING:
    from rich.progress import Progress

    from moesched.planner.uncertainty import Figures

PATIENCE_SECONDS = 1.0


def stdout() -> Console:
    """Return a rich console on standard output."""
    return Console(file=command_output(), highlight=False, width=columns_of_terminal())


def columns_of_terminal() -> int | None:
    """Return the width of the terminal, which COLUMNS may override; None if standard output is no terminal."""
    out = command_output()
    if not out.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    return (
        int(given) if given.isdecimal() and int(given) else os.get_terminal_size(out.fileno()).columns or None
    )


def stderr() -> Console:
    """Return a rich console on standard error."""
    return Console(file=sys.stderr, highlight=False)


def say(text: str = "") -> None:
    """Print text for people on standard output; on a terminal, lines are wrapped between words."""
    width = columns_of_terminal()
    for line in plain_text(text).split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        print_lines(
            wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            if width and len(line) > width
            else [line]
        )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines without wrapping, such as commands to paste; control characters are escaped."""
    for line in lines:
        print(plain_text(line).rstrip(), file=command_output())


def print_json(content: object) -> None:
    """Print one JSON value on standard output."""
    out = command_output()
    out.flush()
    out.buffer.write(msgspec.json.encode(content) + b"\n")  # in UTF-8, whatever the terminal's encoding
    out.flush()


def in_band(
    band: Mapping[str, tuple[float, float, float]] | None, figure: str, write: Callable[[float], str]
) -> str:
    """Return the ends of a figure's uncertainty band as text, such as " (240 to 355)"; empty if the figure has no band.

    Args:
        band: low, middle and high value by the name of a figure; None for no bands.
        figure: name of the figure.
        write: converts a value to text.
    """
    if not band or figure not in band:
        return ""
    low, _, high = band[figure]
    return f" ({write(low)} to {write(high)})"


def say_band(
    band: Mapping[str, tuple[float, float, float]] | None, widest_rate: str | None, at_peak: Figures | None
) -> None:
    """Print up to three lines about a prediction's uncertainty; none without a band.

    Args:
        band: low, middle and high value by the name of a figure; None for no bands.
        widest_rate: name of the least certain of the machine's rates, which widens the band most; None for no line.
        at_peak: figures predicted without estimated losses, at the rates that the machine's profile states; None if
            the machine's costs were measured.
    """
    if band is None:
        return
    measured = "costs that `moesched calibrate` measured"
    basis = measured if at_peak is None else "stated rates and estimated losses, not from measured costs"
    say(f"predicted from {basis}; ranges are in parentheses")
    if widest_rate is not None:
        say(f"least certain rate: {widest_rate}")
    if at_peak is not None:
        say(f"at the stated rates: {at_peak.throughput_tokens_per_second:.4g} tokens/s")
    say()


def planners_choice(rate: float | None, where: str = "") -> str:
    """Return the words which say that the planner chose the policy, with the rate that it predicted.

    The result is empty if the user named the policy.

    Args:
        rate: predicted tokens per second; None if the user named the policy.
        where: further words after the rate, such as " with 8 requests at once"; begins with a space unless empty.
    """
    if rate is None:
        return ""
    figure = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f", the planner's choice ({figure} tokens/s predicted{where}),"


class Bar:
    """A progress bar on standard error, only on a terminal; a context manager, which may be closed early.

    Args:
        what: words for the activity.
        patience: seconds until the bar appears; 0 shows it at once.
    """

    def __init__(self, what: str, *, patience: float = PATIENCE_SECONDS) -> None:
        self._what = plain_text(what)
        self._total: float | None = None
        self._done = 0.0
        self._progress: Progress | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._patience = patience
        self._timer = threading.Timer(patience, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            self._timer.start() if self._patience else self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: float, total: float | None = None, what: str | None = None) -> None:
        """Show the progress of an activity.

        Args:
            done: amount that is done.
            total: amount in total; None keeps the last total or, if `what` names a new activity, means unknown.
            what: words for the activity; None keeps the words.
        """
        other = what is not None and plain_text(what) != self._what
        self._done = done
        self._total = total or (None if other else self._total)
        self._what = plain_text(what or self._what)
        if self._progress is not None:
            (task,) = self._progress.tasks
            self._progress.update(task.id, completed=done, description=self._what)
            if task.total != self._total:
                self._progress.reset(task.id, total=self._total, description=self._what)

    def close(self) -> None:
        """Remove the bar."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def _show(self) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        with self._lock:
            if self._closed:
                return
            columns = [TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()]
            progress = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=stderr(), transient=True
            )
            progress.add_task(self._what, total=self._total, completed=int(self._done))
            progress.start()
            self._progress = progress
