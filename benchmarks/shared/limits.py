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
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from statistics import harmonic_mean, mean, median
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
Contender = Callable[[Sequence[int]], object]
"""Works on pieces of memory, by their numbers."""


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


class Race(NamedTuple):
    """A kernel beside torch and beside the limits of its row, in turns.

    Attributes:
        pieces: memory that a call reads, all of one size; each call takes the next, so that no cache holds it.
        kernel: calls the kernel on pieces by their numbers.
        torch: the same by torch, in several ways; the fastest counts. Empty for none.
        multiplying: instruction sets of the row's products, each for as many of them.
        turn_bytes: about as many bytes as a turn of each reads.
    """

    pieces: Sequence[Piece]
    flop_per_byte: float
    kernel: Contender
    torch: Sequence[Contender]
    multiplying: Sequence[str]
    cores: int
    turn_bytes: int

    def figures(self, turns: int) -> dict[str, float]:
        """Medians of the turns: rates in GB/s, and their ratios in each turn; a first turn is not counted."""
        numbers = count()
        found = [self._turn(numbers) for _ in range(turns + 1)][1:]
        return {name: round(median(turn[name] for turn in found), 3) for name in found[0]}

    def _turn(self, numbers: Iterator[int]) -> dict[str, float]:
        """Read, kernel, torch, kernel, read: the bandwidth of a shared machine moves within a minute."""
        clock, nbytes = clock_for(self.cores), self.pieces[0][1]
        calls = max(1, min(self.turn_bytes // nbytes, len(self.pieces) // 4))

        def taken(calls: int = calls) -> list[int]:
            return [next(numbers) % len(self.pieces) for _ in range(calls)]

        def read() -> float:
            return read_limit([self.pieces[number] for number in taken()], self.cores, clock)

        def rate(contender: Contender, calls: int = calls) -> float:
            warm_up(partial(contender, taken(1)))
            these = taken(calls)
            start = time.clock_gettime(clock)
            contender(these)
            return calls * nbytes / (time.clock_gettime(clock) - start)

        flops = harmonic_mean([measured_flops(self.cores, each, clock) for each in self.multiplying])
        reads, kernel = [read()], [rate(self.kernel)]
        torch = max((rate(way, max(1, calls // 4)) for way in self.torch), default=None)
        kernel.append(rate(self.kernel))
        reads.append(read())
        limit = limit_of(nbytes, self.flop_per_byte * nbytes, mean(reads), flops)
        beside = {} if torch is None else {"torch_gbs": torch / 1e9, "times_torch": mean(kernel) / torch}
        return {
            "read_limit_gbs": limit.read / 1e9,
            "compute_limit_gbs": limit.compute / 1e9,
            "kernel_gbs": mean(kernel) / 1e9,
            "share_of_limit": mean(kernel) / limit.rate,
            **beside,
        }


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
