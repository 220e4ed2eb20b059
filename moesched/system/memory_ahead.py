"""Allocation of memory for weights by a thread, while the program still imports libraries.

The system clears memory before a program gets it. For 1.6 GB in huge pages this takes 0.2 s, or 2 s on a virtual
machine if its host must first find free huge pages. An import keeps only one core busy.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class MemoryAhead:
    """Blocks of zeroed memory in huge pages, which a thread allocates one after the other.

    At the end of a `with` block, blocks that were not used are freed.

    Attributes:
        used: number of blocks that were used.
    """

    def __init__(self) -> None:
        self.used = 0
        self._ready: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> MemoryAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are allocated and not used yet."""
        with self._lock:
            return sum(map(len, self._ready))

    def begin(self, sizes: Sequence[int]) -> None:
        """Start the thread that allocates a block of each size, in bytes; no effect off Linux. Call it at most once."""
        if sizes and sys.platform == "linux":
            self._thread = threading.Thread(
                target=self._take, args=(sizes,), name="memory ahead", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Allocate no more blocks; return once the block under way is complete."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def use(self, nbytes: int) -> mmap.mmap | None:
        """Take a block of at least `nbytes` bytes, and shorten it to whole pages.

        Return None if every block is smaller, or more than an eighth larger.
        """
        with self._lock:
            fitting = [piece for piece in self._ready if nbytes <= len(piece) <= nbytes + nbytes // 8]
            if not fitting:
                return None
            piece = min(fitting, key=len)
            self._ready.remove(piece)
            self.used += 1
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if whole < len(piece):
            piece.resize(whole)
        return piece

    def give_back(self) -> None:
        """Free all blocks that are not used, and allocate no more."""
        self.stop()
        with self._lock:
            self._ready.clear()

    def _take(self, sizes: Sequence[int]) -> None:
        for nbytes in sizes:
            if self._stopped.is_set():
                return
            try:
                piece = new_memory(nbytes)
            except (OSError, MemoryError):  # whoever needs the memory reports it
                return
            address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            ctypes.memset(address, 0, nbytes)  # releases the interpreter lock
            with self._lock:
                self._ready.append(piece)


@runtime_checkable
class UsesMemoryAhead(Protocol):
    """A device that keeps weights in this process's memory, and can take blocks that were allocated ahead.

    Attributes:
        memory_ahead: blocks for resident weights, assigned before the first batch. The device frees the blocks that it
            does not use, at the latest when the weights are loaded.
    """

    memory_ahead: MemoryAhead


def new_memory(nbytes: int) -> mmap.mmap:
    """Map `nbytes` bytes of private memory, in huge pages if possible; the system allocates it at the first write."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
