"""Log lines: to wherever the application sends them with structlog; otherwise warnings go to standard error.

structlog by itself prints to standard output, where the results of an application are.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

WARNING = 30


class Log:
    """The log of one module.

    name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._configured = structlog.get_logger(name)

    def info(self, event: str, **facts: Any) -> None:
        """Tell what happens."""
        self._target().info(event, **facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Tell what needs attention, although the run goes on."""
        self._target().warning(event, **facts)

    def _target(self) -> Any:
        return self._configured if structlog.is_configured() else _unconfigured


class StandardError(io.TextIOBase):
    """Standard error, whatever that is by then; a line that cannot be written, as on a full disk, is lost."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def printer() -> structlog.PrintLogger:
    """Prints lines on standard error."""
    return structlog.PrintLogger(cast(TextIO, StandardError()))


_unconfigured = structlog.wrap_logger(printer(), wrapper_class=structlog.make_filtering_bound_logger(WARNING))
