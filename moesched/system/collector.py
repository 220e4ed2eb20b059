"""Python's garbage collector, set for a program that imports torch: its modules are 300,000 objects, and all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 50_000
"""New objects before the collector looks through them. With Python's 700, a seventh of torch's import goes to that."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely from here to the program's end, and not at that: it would take 0.2 s to find modules in use."""
    gc.set_threshold(OBJECTS, 20, 100)
    try:
        yield
    finally:
        gc.freeze()
