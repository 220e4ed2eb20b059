"""Timing of calls, alone and beside others, and repetition of measurements that other processes disturbed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Protocol

from moesched.calibration.other_load import OtherLoad

Call = Callable[[], object]
Step = Callable[[], Call]
"""Measures something and returns the call that records it."""

MOST_OTHER_CORES = 0.1
"""Cores that other processes may keep busy during a measurement."""


class Others(Protocol):
    """Measures the load of other processes."""

    def cores(self) -> float: ...


def undisturbed(step: Step, repeats: int, watch: Callable[[], Others] = OtherLoad) -> tuple[float, int]:
    """Record what a step measures, repeating it while other processes are busy.

    Args:
        repeats: how often it may be repeated.
        watch: starts to measure the load of other processes.

    Returns:
        The cores that others kept busy during the recorded measurement, and the repeats that are left.
    """
    while True:
        others = watch()
        record = step()
        cores = others.cores()
        if cores <= MOST_OTHER_CORES or not repeats:
            record()
            return cores, repeats
        repeats -= 1


def measure(call: Call, seconds: float, least: int = 5) -> float:
    """The median time of a call, after a first one that does not count.

    Args:
        seconds: the call is repeated for at least this long.
        least: the call is repeated at least this often.
    """
    call()
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < least or perf_counter() < end:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)
