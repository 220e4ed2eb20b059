"""The rate at which all cores multiply, taken in a moment: on a shared host, the clock and neighbours change it."""

from __future__ import annotations

import time
from statistics import median_low

from benchmarks.shared.limits import PAUSE, measured_flops
from moesched.system.cores import usable_cores

READINGS = 9
"""The middle one counts, as another process may take a core during some."""


def core_gflops() -> float:
    """GFLOP/s of products from registers alone, from readings that take some milliseconds each."""
    time.sleep(PAUSE)
    return round(median_low(measured_flops(usable_cores()) for _ in range(READINGS)) / 1e9, 1)
