"""Settings of Python's garbage collector for programs that import torch, which makes 300,000 objects that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 50_000
"""New objects before the collector looks through them. With Python's 700, it takes a seventh of torch's import."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make garbage collections rare from now on, and exempt all objects from them once the context ends.

    The context is for a whole program: Python's collection at the program's end, which would take 0.2 s, then has no
    objects to look through.
    """
    gc.set_threshold(OBJECTS, 20, 100)
    try:
        yield
    finally:
        gc.freeze()
