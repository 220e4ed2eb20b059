"""Logs: structlog on standard error, so that standard output holds results only."""

from __future__ import annotations

import os
import sys

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def send_logs_to_stderr() -> None:
    """Show warnings and errors, or messages from the level in MOESCHED_LOG upwards."""
    import structlog

    level = LEVELS.get(os.environ.get("MOESCHED_LOG", "").lower(), LEVELS["warning"])
    colors = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=colors),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever that is by then
        cache_logger_on_first_use=False,
    )
