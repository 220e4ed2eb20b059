"""Captures: the work that a stream records for an imitated CUDA graph, and the calls that CUDA forbids meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol


class InPool(Protocol):
    """The interface of a block of GPU memory, with the memory pool that the block was taken from.

    Attributes:
        pool: the memory pool of CUDA graphs that the block was taken from; None for ordinary memory.
    """

    pool: object


class Capture:
    """The work that a stream records, from the beginning of a capture to its end.

    Args:
        mode: "global" or "thread_local", which `LaggingGraph.capture_begin` explains.

    Attributes:
        pool: the memory pool that captured calls allocate from.
        works: the pieces of work, in order.
        broken: whether a call during the capture was refused.
    """

    def __init__(self, pool: object, mode: str) -> None:
        self.pool = pool
        self.works: list[Callable[[], object]] = []
        self.broken = False
        self._mode = mode
        self._thread = threading.get_ident()
        self._blocks: list[weakref.ref[InPool]] = []

    def uses(self, block: InPool) -> None:
        """Note a block that captured work uses, for `freed` to check; blocks of the capture's own pool are left out."""
        if block.pool is not self.pool:
            self._blocks.append(weakref.ref(block))

    def is_of_this_thread(self) -> bool:
        """Test whether the calling thread began the capture."""
        return threading.get_ident() == self._thread

    def forbids(self) -> bool:
        """Test whether this capture forbids the calling thread to make unsafe calls, such as allocations."""
        return self._mode == "global" or self.is_of_this_thread()

    def refused(self, why: str = "") -> RuntimeError:
        """Mark the capture as broken because a call was refused; returns the error for the caller to raise.

        why: an addition to the error's message.
        """
        self.broken = True
        return RuntimeError(f"CUDA error: operation not permitted when stream is capturing{why}")

    def freed(self) -> bool:
        """Test whether memory that captured work uses was freed; memory of the capture's pool is not checked."""
        return any(block() is None for block in self._blocks)
