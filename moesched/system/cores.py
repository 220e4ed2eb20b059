"""The cores that this process may use: those of its affinity, within the CPU quota of its group; and their division."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from moesched.errors import BadInput
from moesched.system.control_groups import ROOT, groups_of

MOST_ISSUING = 4
"""Cores for threads that issue tasks and wait: one for each of the three streams of a GPU, one for the driver."""
MOST_COPYING = 16
"""Threads that copy weights: on an H100's host, 8 copied 27 GB/s and 16 copied 45, of 55 that the link takes."""


def affinity() -> list[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return the number of cores that this process may use at once, within its affinity and its CPU quota."""
    return min(len(affinity()), cpu_quota())


class CorePlan(NamedTuple):
    """Numbers of threads and cores on the host, by purpose.

    Attributes:
        kernels: threads that compute attention and experts.
        copies: threads that copy weights into page-locked memory, in bursts, on all cores but one.
        issuing: cores that kernels leave to threads that issue tasks to a GPU and wait for it.
    """

    kernels: int
    copies: int
    issuing: int


@runtime_checkable
class DividesCores(Protocol):
    """A device with a division of the host's cores, `core_plan`; None if kernels use all of them."""

    core_plan: CorePlan | None


def divided_cores(cores: int, threads: int | None = None) -> CorePlan:
    """Divide the host's cores for a run with a GPU.

    Args:
        threads: threads for attention and experts; by default all cores but those for issuing.
    """
    issuing = min(MOST_ISSUING, max(1, cores // 4))
    kernels = threads or max(1, cores - issuing)
    return CorePlan(kernels, copies=min(MOST_COPYING, max(1, cores - 1)), issuing=issuing)


def require_threads(threads: int) -> None:
    """Check a number of threads that a user gives.

    Raises:
        BadInput: it is less than 1, or more than there are cores.
    """
    cores = usable_cores()
    if not 1 <= threads <= cores:
        raise BadInput(
            f"threads is {threads}: give 1 to {cores}, the number of cores that this process may use"
        )


@cache
def cpu_quota(root: Path = ROOT) -> int:
    """Return the cores whose time the control groups of this process allow, rounded up; 2**31 without a limit."""
    return min((cores for group in groups_of("cpu", root) for cores in _limit(group)), default=2**31)


def _limit(group: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        yield _rounded_up(int(quota), int(period))  # "max" is no number
    with suppress(OSError, ValueError):
        quota = (group / "cpu.cfs_quota_us").read_text()
        yield _rounded_up(int(quota), int((group / "cpu.cfs_period_us").read_text()))


def _rounded_up(quota: int, period: int) -> int:
    if quota <= 0 or period <= 0:
        raise ValueError("no limit")
    return -(-quota // period)
