"""Logging by structlog: lines go where the application sends them; without a set-up, warnings go to standard error.

structlog by itself prints to standard output, which is for the application's results only. Its import is slow, and most
commands log no line that is shown, so structlog is imported at the first line that is shown.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from structlog import PrintLogger

INFO, WARNING = 20, 30


class _Choice:
    """Log settings for an application that does not configure structlog itself.

    Attributes:
        least: the lowest level of lines that are shown.
        configure: configures structlog when it is imported; None for warnings on standard error.
    """

    least = WARNING
    configure: Callable[[], object] | None = None


def show_lines(least: int, configure: Callable[[], object]) -> None:
    """Show log lines of a level and of all levels above it.

    Args:
        least: the lowest level that is shown, such as `INFO`.
        configure: configures structlog; called when structlog is imported.
    """
    _Choice.least, _Choice.configure = least, configure
    if "structlog" in sys.modules:
        configure()


class Log:
    """The log of one module.

    Args:
        name: name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, event: str, **facts: object) -> None:
        """Log an event of normal work; `facts` are its values by name."""
        if _is_shown(INFO):
            _logger(self._name).info(event, **facts)

    def warning(self, event: str, **facts: object) -> None:
        """Log an event that needs the user's attention, although the run continues; `facts` are its values by name."""
        if _is_shown(WARNING):
            _logger(self._name).warning(event, **facts)


def _is_shown(level: int) -> bool:
    return level >= _Choice.least or _is_configured()


def _is_configured() -> bool:
    if "structlog" not in sys.modules:
        return False
    import structlog

    return structlog.is_configured()


def _logger(name: str) -> Any:
    import structlog

    if not structlog.is_configured() and _Choice.configure is not None:
        _Choice.configure()
    return structlog.get_logger(name) if structlog.is_configured() else _unconfigured()


@cache
def _unconfigured() -> Any:
    import structlog

    return structlog.wrap_logger(printer(), wrapper_class=structlog.make_filtering_bound_logger(WARNING))


class StandardError(io.TextIOBase):
    """A text stream that writes to the present `sys.stderr` at each write; text that cannot be written is dropped."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def printer() -> PrintLogger:
    """Return a structlog logger that prints lines on standard error."""
    from structlog import PrintLogger

    return PrintLogger(cast(TextIO, StandardError()))
