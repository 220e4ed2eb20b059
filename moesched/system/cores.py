"""The cores that this process may use: those of its affinity, within the CPU quota of its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def affinity() -> list[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """The number of cores: no more than the quota gives the time of, since further threads would only wait."""
    return min(len(affinity()), cpu_quota())


@cache
def cpu_quota(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """The cores whose time the control groups of this process allow, rounded up; many where there is no limit.

    Args:
        cgroups: where the control groups are mounted, of version 1 or 2.
        own: the list of this process's groups.
    """
    return min(_quotas(cgroups, own), default=2**31)


def _quotas(cgroups: Path, own: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _limits(cgroups, path)
                yield from _limits(cgroups / "unified", path)
            elif "cpu" in controllers.split(","):
                yield from _limits(cgroups / controllers, path)
                yield from _limits(cgroups / "cpu", path)


def _limits(mount: Path, path: str) -> Iterator[int]:
    """Of a group and those that it is in."""
    group = mount / path.lstrip("/")
    for each in (group, *group.parents):
        if each.is_relative_to(mount):
            yield from _limit(each)


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
