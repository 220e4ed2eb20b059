"""Loading on several threads, with progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moesched.seams import Progress

THREADS = 8
"""Most threads that load at a time: one copies a fraction of what the page cache gives."""

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def load_each(
    load: Callable[[Item], Loaded],
    items: Sequence[Item],
    sizes: Sequence[int],
    threads: int,
    tell: Progress,
) -> list[Loaded]:
    """Load items of these sizes, in bytes, on several threads; returns the results in order.

    After an error or Ctrl-C no further item is started; it is raised when the started ones have ended.
    """
    loaded: list[Loaded] = []
    done, total = 0, sum(sizes)
    pool = ThreadPoolExecutor(min(threads, THREADS), "loading")
    try:
        for result, nbytes in zip(pool.map(load, items), sizes, strict=True):
            loaded.append(result)
            done += nbytes
            tell("loading weights", done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return loaded
