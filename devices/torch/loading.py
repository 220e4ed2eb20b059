"""The loading of many items on several threads, with progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moesched.seams import Progress

THREADS = 8
"""Most threads that load at a time; a single one does not reach the rate of the page cache."""

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def load_each(
    load: Callable[[Item], Loaded],
    items: Sequence[Item],
    sizes: Sequence[int],
    threads: int,
    tell: Progress,
) -> list[Loaded]:
    """Load items on several threads; returns the results in order.

    After an error or Ctrl-C no further item is started; the error is raised when the started ones have ended.

    Args:
        sizes: bytes of each item, for the progress.
        tell: called with (what is done, bytes so far, all bytes).
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
