"""Standard error without the messages of libraries that write there themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drop all that the process writes to standard error, as libraries in Rust do when they panic.

    For short calls before a run, while no other thread has something to say.
    """
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
