"""The limit of a row: the rate at which the machine can read its bytes, or multiply by them, whichever is smaller.

`read_limit` is the rate of one loop that reads the same bytes as the kernel on as many cores, in the same round; each
thread reads four streams at once and prefetches them a kilobyte ahead, since one alone does not fill the memory's
queues. Its threads are awake when the time begins, as a kernel's are from call to call, and each has a core of its own:
the system may put a new thread on the core of the one that made it, which would halve the limit. `compute_limit` is
measured FLOP/s over the FLOPs per byte of the row, with products of an instruction set from registers alone. Both are
in bytes per second, as a row's own rate is.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.shared.compiled import compiled

SOURCE = Path(__file__).with_name("limits.c")
ROUNDS = 500_000
"""Of the loop that only multiplies: some milliseconds, as a processor takes a while to reach its speed."""
WORD = 8
PAUSE = 0.02
"""Seconds before a contender's turn: torch's threads keep their cores busy for some milliseconds after a call."""

Piece = tuple[int, int]
"""Address and bytes of memory that a kernel reads."""


class Limit(NamedTuple):
    """The limits of a row, in bytes per second.

    Attributes:
        read: the rate of reading the row's bytes with nothing else to do.
        compute: the rate at which the processor's peak FLOP/s would use the row's bytes up.
    """

    read: float
    compute: float

    @property
    def rate(self) -> float:
        """The smaller one."""
        return min(self)

    @property
    def bound_by(self) -> str:
        """The name of the smaller one."""
        return "read_limit" if self.read <= self.compute else "compute_limit"

    def fraction(self, nbytes: float, seconds: float) -> float:
        """The share of the limit that a kernel reached that used bytes in a time."""
        return nbytes / seconds / self.rate


def limit_of(nbytes: float, flops: float, read: float, flops_per_second: float) -> Limit:
    """The limits of a row that reads bytes and does FLOPs with them, from the machine's two rates."""
    return Limit(read, flops_per_second / (flops / nbytes))


def clock_for(cores: int) -> int:
    """The clock of a thread's own time on one core, which other processes disturb least; the wall's on several."""
    return time.CLOCK_THREAD_CPUTIME_ID if cores == 1 else time.CLOCK_MONOTONIC


def warm_up(call: Callable[[], object]) -> None:
    """Let the threads of others fall asleep, and wake a contender's by a call that is not measured."""
    time.sleep(PAUSE)
    call()


def read_limit(pieces: Sequence[Piece], cores: int, clock: int = time.CLOCK_MONOTONIC) -> float:
    """Bytes per second of reading pieces of memory once, on as many cores.

    clock: the system's; that of a thread's own time is for one core.
    """
    addresses = (ctypes.c_void_p * len(pieces))(*(address for address, _ in pieces))
    words = (ctypes.c_size_t * len(pieces))(*(nbytes // WORD for _, nbytes in pieces))
    seconds = _library().read_seconds(addresses, words, len(pieces), cores, clock)
    if seconds <= 0:
        raise RuntimeError(f"the read loop does not run on {cores} cores")
    return sum(nbytes for _, nbytes in pieces) / float(seconds)


def measured_flops(
    cores: int, instruction_set: str | None = None, clock: int = time.CLOCK_MONOTONIC
) -> float:
    """Peak FLOP/s of as many cores with an instruction set, by default the best one.

    Raises:
        RuntimeError: the processor or the system does not have it.
    """
    name = instruction_set and instruction_set.encode()
    found = float(_library().flops_per_second(name, ROUNDS, cores, clock))
    if found <= 0:
        raise RuntimeError(f"the processor or the system does not allow products with {instruction_set}")
    return found


class Buffer:
    """Memory to read in place of weights, as large as those, in large pages where the system has them."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._values = np.frombuffer(self._memory, np.uint8)
        self._values.fill(1)
        self._begin = 0

    def next(self, nbytes: int) -> Piece:
        """Bytes that were not read for the longest time, so that no cache has them; at most all of it."""
        nbytes = min(nbytes, self._values.nbytes)
        if self._begin + nbytes > self._values.nbytes:
            self._begin = 0
        begin, self._begin = self._begin, self._begin + nbytes // WORD * WORD
        return self._values.ctypes.data + begin, nbytes


@cache
def _library() -> ctypes.CDLL:
    library = compiled(SOURCE)
    library.read_seconds.restype = library.flops_per_second.restype = ctypes.c_double
    library.read_seconds.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 3]
    library.flops_per_second.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    return library
