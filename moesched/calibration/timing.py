"""Times calls; measures the load of other processes meanwhile, and repeats measurements that they disturbed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol

Call = Callable[[], object]
Step = Callable[[], Call]
"""A measurement; it returns a call that records the result."""

MOST_OTHER_CORES = 0.1
"""Largest number of cores that other processes may keep busy during a measurement that counts."""


class Others(Protocol):
    """Interface of `OtherLoad`, an object that measures the load of other processes from its creation on."""

    def cores(self) -> float: ...


class OtherLoad:
    """Load of other processes and the hypervisor since this object was made.

    Interrupts do not count: they may serve this process's own reads.
    """

    def __init__(self) -> None:
        self._since = perf_counter(), _busy_seconds_of_others()

    def cores(self) -> float:
        """Return the mean number of cores that others kept busy; 0 if the system does not report it."""
        start, busy = self._since
        return max(0.0, _busy_seconds_of_others() - busy) / (perf_counter() - start)


def _busy_seconds_of_others() -> float:
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, _, _, stolen = map(int, numbers)
    all_processes = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return all_processes - own.user - own.system


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
        times.append(timed(call))
    return median(times)


def measure_after_pause(call: Call, pause: Call, seconds: float, repeats: int) -> float:
    """Return the median seconds by which a call takes longer after a pause than right after another call.

    Args:
        pause: called until the pause has lasted long enough.
        seconds: the length of a pause.
        repeats: number of pairs of calls that are compared.
    """
    longer: list[float] = []
    for _ in range(repeats):
        call()
        after_call = timed(call)
        end = perf_counter() + seconds
        while perf_counter() < end:
            pause()
        longer.append(timed(call) - after_call)
    return median(longer)


def timed(call: Call) -> float:
    """Return the seconds that a call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start
