"""The processor cores that this process may use, by its affinity and CPU quota, and their division among threads."""

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
    """Division of the host's cores in a run with a GPU.

    Attributes:
        kernels: number of threads that compute attention and experts.
        copies: number of threads that copy weights into page-locked memory. They are idle between copies, so they use
            the cores of `kernels`, too.
        issuing: number of cores left free for threads that issue tasks to a GPU and wait for it.
    """

    kernels: int
    copies: int
    issuing: int


@runtime_checkable
class DividesCores(Protocol):
    """A device that divides the host's cores.

    Attributes:
        core_plan: the division; None if kernels use all cores.
    """

    core_plan: CorePlan | None


def divided_cores(cores: int, threads: int | None = None) -> CorePlan:
    """Divide the host's cores between kernels, copies and the issuing of tasks to a GPU.

    Args:
        cores: number of cores.
        threads: number of threads for attention and experts; None for all cores but those for issuing.
    """
    issuing = min(MOST_ISSUING, max(1, cores // 4))
    kernels = threads or max(1, cores - issuing)
    return CorePlan(kernels, copies=min(MOST_COPYING, max(1, cores - 1)), issuing=issuing)


def require_threads(threads: int) -> None:
    """Check that a user's number of threads is within the cores that this process may use.

    Raises:
        BadInput: the number is less than 1, or more than there are cores.
    """
    cores = usable_cores()
    if not 1 <= threads <= cores:
        raise BadInput(
            f"threads is {threads}: give 1 to {cores}, the number of cores that this process may use"
        )


@cache
def cpu_quota(root: Path = ROOT) -> int:
    """Return the CPU quota of this process's control groups as a number of cores, rounded up; 2**31 without a quota.

    Args:
        root: folder in which /sys and /proc are looked for.
    """
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
