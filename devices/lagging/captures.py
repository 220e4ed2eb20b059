"""The work that a stream records for an imitated CUDA graph, and what it may not do meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol


class InPool(Protocol):
    """A block of memory; `pool` is the graphs' memory that it was cut from, if it was."""

    pool: object


class Capture:
    """The work that a stream records from the begin of a capture to its end.

    Attributes:
        pool: the memory that captured calls allocate from.
        works: the pieces of work, in order.
        broken: whether a call in between was refused.
    """

    def __init__(self, pool: object, mode: str) -> None:
        self.pool = pool
        self.works: list[Callable[[], object]] = []
        self.broken = False
        self._mode = mode
        self._thread = threading.get_ident()
        self._blocks: list[weakref.ref[InPool]] = []

    def uses(self, block: InPool) -> None:
        """Note that captured work reads or writes a block."""
        if block.pool is not self.pool:
            self._blocks.append(weakref.ref(block))

    def is_of_this_thread(self) -> bool:
        """True on the thread that began the capture."""
        return threading.get_ident() == self._thread

    def forbids(self) -> bool:
        """True if the calling thread may not make calls that CUDA counts as unsafe."""
        return self._mode == "global" or self.is_of_this_thread()

    def refused(self, why: str = "") -> RuntimeError:
        """Break the capture; returns the error to raise."""
        self.broken = True
        return RuntimeError(f"CUDA error: operation not permitted when stream is capturing{why}")

    def freed(self) -> bool:
        """True if a block outside of the pool is gone."""
        return any(block() is None for block in self._blocks)
