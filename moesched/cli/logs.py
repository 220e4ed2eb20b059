"""Sends structlog's logs to standard error, so that standard output holds results only."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from functools import partial
from typing import Any

from moesched.errors import BadInput
from moesched.system.logs import printer, show_lines
from moesched.system.plain_text import plain_text, shown

SWITCH = "MOESCHED_LOG"
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def send_logs_to_stderr() -> None:
    """Show log messages on standard error: from the level in MOESCHED_LOG upwards, by default warnings and errors.

    Raises:
        BadInput: MOESCHED_LOG is no level.
    """
    given = os.environ.get(SWITCH) or "warning"
    level = LEVELS.get(given.lower())
    if level is None:
        raise BadInput(f"{SWITCH} is {shown(given)} in the environment: set {', '.join(LEVELS)}, or unset it")
    show_lines(level, partial(_configure, level))


def _configure(level: int) -> None:
    import structlog

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _plain,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: printer(),
        cache_logger_on_first_use=False,
    )


def _plain(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape text from other nodes and files in a log line, so that it cannot act on the terminal."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = plain_text(value)
    return event
