"""Settings of Python's garbage collector for programs that import torch, whose 300,000 objects all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 50_000
"""New objects before the collector looks through them. With Python's 700, it takes a seventh of torch's import."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make garbage collections rare in this context, and skip the collection of 0.2 s at the program's end."""
    gc.set_threshold(OBJECTS, 20, 100)
    try:
        yield
    finally:
        gc.freeze()
