"""Measures the load of other processes during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path


class OtherLoad:
    """Load of other processes and the hypervisor since this object was made.

    Interrupts do not count: they may serve this process's own reads.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter(), _busy_seconds_of_others()

    def cores(self) -> float:
        """Return the mean number of cores that others kept busy; 0 if the system does not report it."""
        start, busy = self._since
        return max(0.0, _busy_seconds_of_others() - busy) / (time.perf_counter() - start)


def _busy_seconds_of_others() -> float:
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, _, _, stolen = map(int, numbers)
    all_processes = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return all_processes - own.user - own.system
