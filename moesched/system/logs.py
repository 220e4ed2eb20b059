"""Log lines: to wherever the application sends them with structlog; otherwise warnings go to standard error.

structlog by itself prints to standard output, where the results of an application are. It is imported for the first
line that is shown, since it imports a lot: most commands show none.
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
    """The level and the set-up of the lines that are shown where the application did not configure structlog."""

    least = WARNING
    configure: Callable[[], object] | None = None


def show_lines(least: int, configure: Callable[[], object]) -> None:
    """Show lines from a level on. `configure` sets up structlog, once that is imported."""
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

    def info(self, event: str, **facts: Any) -> None:
        """Log an event that is normal, with facts about it."""
        if _is_shown(INFO):
            _logger(self._name).info(event, **facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Log an event that needs attention, although the run continues."""
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
    """A stream that writes to the present `sys.stderr`; drops lines that cannot be written, as on a full disk."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def printer() -> PrintLogger:
    """A structlog logger that prints lines on standard error."""
    from structlog import PrintLogger

    return PrintLogger(cast(TextIO, StandardError()))
