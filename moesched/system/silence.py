"""Suppression of messages that libraries write to standard output or standard error themselves."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STDOUT, STDERR = 1, 2

_lock = threading.Lock()
_silences: Counter[int] = Counter()
_kept: dict[int, int] = {}


@contextmanager
def silent(descriptor: int) -> Iterator[None]:
    """Drop everything that the process writes to a descriptor until the context ends, also from C libraries.

    The context is for short calls. Threads may use it at the same time: output returns when the last thread leaves the
    context.

    Args:
        descriptor: `STDOUT` or `STDERR`.
    """
    with _lock:
        _silences[descriptor] += 1
        if _silences[descriptor] == 1:
            _close(descriptor)
    try:
        yield
    finally:
        with _lock:
            _silences[descriptor] -= 1
            if not _silences[descriptor]:
                _open(descriptor)


def _close(descriptor: int) -> None:
    with suppress(OSError):  # it is closed, or there is no null device
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            _kept[descriptor] = os.dup(descriptor)
            os.dup2(null, descriptor)
        finally:
            os.close(null)


def _open(descriptor: int) -> None:
    kept = _kept.pop(descriptor, None)
    if kept is not None:
        os.dup2(kept, descriptor)
        os.close(kept)
