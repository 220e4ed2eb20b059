"""The rate at which all cores read memory, taken in a moment: on a shared host, others slow it down by the minute."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from statistics import median_low

from benchmarks.shared.limits import PAUSE, Buffer, read_limit
from moesched.system.cores import usable_cores

NBYTES, READINGS = 512 << 20, 9
"""Of a reading: more than caches hold; and their number. The middle one counts, as another process may take a core
during some."""
MOST_CHANGE = 0.1
"""Share by which rates may differ that count as one."""


def memory_gbs() -> float:
    """GB/s, from readings that take 50 to 100 ms at 50 to 90 GB/s."""
    pieces = [_memory().next(NBYTES)]
    time.sleep(PAUSE)
    rates = [read_limit(pieces, usable_cores()) for _ in range(READINGS)]
    return round(median_low(rates) / 1e9, 1)


def at_one_rate(rates: Iterable[float]) -> bool:
    """Test whether rates differ by no more than one rate does; true if there are none."""
    found = list(rates)
    return not found or max(found) <= (1 + MOST_CHANGE) * min(found)


@cache
def _memory() -> Buffer:
    return Buffer(NBYTES)
