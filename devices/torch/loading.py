"""A function that loads many items on several threads, and reports the progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moesched.seams import Progress

THREADS = 8
"""Largest number of threads that load at a time; a single one does not reach the rate of the page cache."""

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def load_each(
    load: Callable[[Item], Loaded],
    items: Sequence[Item],
    sizes: Sequence[int],
    threads: int,
    tell: Progress,
) -> list[Loaded]:
    """Call `load` for each item, on several threads; returns the results in the order of the items.

    After an error or Ctrl-C, no further item is started; the error is raised when all items under way have ended.

    Args:
        sizes: bytes of each item, for the progress.
        threads: number of threads; at most 8 are used.
        tell: is called with a text, the bytes loaded so far, and all bytes.
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
