"""Memory that is allocated before it is needed, while the program imports libraries.

The system clears memory before it gives it: 1.6 GB in huge pages take 0.2 s, and 2 s on a virtual machine whose host
has to find them first. An import keeps one core busy.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class MemoryAhead:
    """Pieces of zeroed memory in huge pages, which a thread allocates one by one; a context manager that frees them.

    Attributes:
        used: number of pieces that were used.
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
        """Bytes of the pieces that are not used."""
        with self._lock:
            return sum(map(len, self._ready))

    def begin(self, sizes: Sequence[int]) -> None:
        """Start a thread that allocates these sizes in bytes; does nothing off Linux. Called at most once."""
        if sizes and sys.platform == "linux":
            self._thread = threading.Thread(
                target=self._take, args=(sizes,), name="memory ahead", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Allocate no more pieces; waits for the one under way."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def use(self, nbytes: int) -> mmap.mmap | None:
        """Take a piece, cut to `nbytes` in whole pages; None if none is large enough, or only much larger ones are."""
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
        """Free all pieces that are not used, and allocate no more."""
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
    """A device that keeps weights in this process's memory, some of which was allocated while libraries were imported.

    Attributes:
        memory_ahead: memory for resident weights; assigned before the first batch. The device frees the rest once they
            are loaded.
    """

    memory_ahead: MemoryAhead


def new_memory(nbytes: int) -> mmap.mmap:
    """Map private memory, which the system allocates when it is first written to, in huge pages where there are any."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
