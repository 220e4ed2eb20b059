"""Times calls, alone and beside others, and repeats measurements that other processes disturbed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Protocol

from moesched.calibration.other_load import OtherLoad

Call = Callable[[], object]
Step = Callable[[], Call]
"""A measurement; it returns a call that records the result."""

MOST_OTHER_CORES = 0.1
"""Largest number of cores that other processes may keep busy during a measurement that counts."""


class Others(Protocol):
    """Interface of `OtherLoad`, an object that measures the load of other processes from its creation on."""

    def cores(self) -> float: ...


def undisturbed(step: Step, repeats: int, watch: Callable[[], Others] = OtherLoad) -> tuple[float, int]:
    """Measure a step and record the result; measure the step again if other processes were busy meanwhile.

    Args:
        step: a function that measures, and returns a function that records the result.
        repeats: number of times that the step may be repeated.
        watch: a function that begins to measure the load of other processes.

    Returns:
        The mean number of cores that others kept busy during the recorded measurement, and the number of repeats left.
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
    """Return the median seconds of one call, from repeated calls; a first call is not counted.

    Args:
        seconds: the least time over which the call is repeated.
        least: the least number of repetitions.
    """
    call()
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < least or perf_counter() < end:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)
