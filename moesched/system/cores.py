"""The cores that this process may use."""

from __future__ import annotations

import os


def affinity() -> list[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """The number of cores."""
    return len(affinity())
