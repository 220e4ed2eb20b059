"""Ctrl-C held back for a moment: while garbage is collected it may be lost, while compiled code is loaded do worse."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C that comes meanwhile is raised as KeyboardInterrupt at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def remember(*_: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
