"""Waiting times of tests, long enough for a slow and busy machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

PATIENCE_SECONDS = 100.0
"""Below pytest's own limit, so that a test which waits in vain says for what."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition that another thread or process brings about."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in {PATIENCE_SECONDS:g} s"
        pause.wait(0.002)


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has noticed."""
    wait_until(lambda: not is_alive(pid), f"the end of process {pid}")


def is_alive(pid: int) -> bool:
    """Test whether a process exists and has not ended."""
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
