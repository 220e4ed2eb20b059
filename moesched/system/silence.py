"""Standard output and error without the messages of libraries that write there themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STDOUT, STDERR = 1, 2


@contextmanager
def silent(descriptor: int) -> Iterator[None]:
    """Drop everything that the process writes to the descriptor `STDOUT` or `STDERR`, C libraries included.

    For short calls before a run, while no other thread writes.
    """
    try:
        kept = os.dup(descriptor)
    except OSError:  # it is closed
        yield
        return
    try:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
