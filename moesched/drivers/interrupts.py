"""Delays Ctrl-C during garbage collection, which can lose it, and the loading of compiled code, which it can break."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay a Ctrl-C: it raises KeyboardInterrupt when the context ends."""
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
