"""Reads of files, several of them under way at a time."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence

from ..native.compiled import instruction_sets, library
from ..native.kernels import address
from ..products.team import Team
from ..shared.direct_file import BlockRead

AT_ONCE = 8
"""Number of reads of one transfer that are under way at a time."""

SLOW = 3
"""Number of transfers in a row whose reads were made one by one, after which threads make them."""

Read = Callable[[], object]


class DiskReads:
    """Makes reads of files, several at a time, and returns when all have ended.

    Reads that bypass the page cache are queued in Linux (`io_submit`), and the calling thread waits until all have
    ended. They get no threads of their own: at the end of a read, its thread would have to wait for a core and for
    Python's lock while other lanes compute. Threads make all other reads, and all reads on other systems. They also
    take over if `io_submit` returns only when the reads have ended, as it does for a file system in memory.

    Args:
        at_once: number of reads under way at a time.
        queued: False to make all reads by threads.
    """

    def __init__(self, at_once: int = AT_ONCE, *, queued: bool = True) -> None:
        self._at_once = at_once
        self._queue = library().moesched_new_reads(at_once) if queued and instruction_sets() else None
        self._free = threading.Lock()
        self._made: Team | None = None
        self._one_by_one = 0

    @property
    def queued(self) -> bool:
        """True if the system makes reads past the page cache on its own; False if threads make all reads."""
        return self._queue is not None and self._one_by_one < SLOW

    def run(self, reads: Sequence[Read]) -> None:
        """Make all reads, in any order; after an error, reads that have not begun may be dropped.

        Raises:
            MoeschedError: the disk failed, or a file ends early.
        """
        others = reads
        if self.queued and self._free.acquire(blocking=False):
            try:
                others = self._run_queued(reads)
            finally:
                self._free.release()
        if others:
            self._team().run(others)

    def close(self) -> None:
        """End the threads, and give the queue back to the system; a second call does nothing."""
        if self._made is not None:
            self._made.close()
            self._made = None
        if self._queue is not None:
            library().moesched_free_reads(self._queue)
            self._queue = None

    def _run_queued(self, reads: Sequence[Read]) -> list[Read]:
        """Have the system make those reads that it can; returns the others, and those that failed or ended early."""
        others: list[Read] = []
        queued: list[BlockRead] = []
        numbers = array("q")
        for read in reads:
            if isinstance(read, BlockRead) and read.file.descriptor >= 0 and not read.cached:
                queued.append(read)
                numbers.extend(
                    (read.file.descriptor, _address_of(read.into), len(read.into), read.offset, -1)
                )
            else:
                others.append(read)
        one_by_one = library().moesched_read(self._queue, address(numbers), len(queued))
        self._one_by_one = self._one_by_one + 1 if one_by_one and len(queued) > 1 else 0
        for read, done in zip(queued, numbers[4::5], strict=True):
            if done < read.needed:
                others.append(read)  # an ordinary read reads the rest, or raises the error
            elif read.note is not None:
                read.note(done)
        return others

    def _team(self) -> Team:
        if self._made is None:
            self._made = Team(self._at_once)
        return self._made


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
