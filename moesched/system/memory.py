"""Sizes of memory in bytes: of this machine, of the control groups that limit it, and of this process."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moesched.errors import OutOfMemory
from moesched.system.control_groups import ROOT, groups_of, lines_of
from moesched.system.macos import Ask, free_memory, output_of

COUNTS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For control groups of version 2, then of version 1: the file with the limit, the file with the bytes in use, and the
key in `memory.stat` of those that can be freed.
"""

LEAST_ADDRESS_SPACE = 760_000_000
"""Bytes that Python, torch and its first kernel map before any weights; measured with torch 2 for the CPU on Linux."""


class GroupMemory(NamedTuple):
    """Memory of a control group.

    Attributes:
        limit: the largest number of bytes that the group's processes may have.
        used: bytes in use that cannot be freed.
    """

    limit: int
    used: int


def total_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that processes here can have: the machine's, or a control group's smaller limit.

    Args:
        root: folder in which /sys and /proc are looked for.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([_meminfo("MemTotal", root) or physical, *(group.limit for group in control_groups(root))])


def available_memory(root: Path = ROOT, ask: Ask = output_of) -> int:
    """Return the bytes of memory that a new allocation could get, on the machine and within each control group's limit.

    Args:
        root: folder in which /sys and /proc are looked for.
        ask: runs a command of macOS and returns its output.
    """
    free = _meminfo("MemAvailable", root) or free_memory(ask) or total_memory(root)
    return min([free, *(max(0, group.limit - group.used) for group in control_groups(root))])


def resident_bytes() -> int:
    """Return the resident bytes of this process; on macOS, which does not report them, the peak so far."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the most resident bytes that this process ever had."""
    peak = _kilobytes(Path("/proc/self/status"), "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def require_address_space() -> None:
    """Check that the limit of the address space is high enough to import torch, which would crash otherwise.

    Raises:
        OutOfMemory: the limit is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise OutOfMemory(
            f"out of memory: this process may map {limit // 1_000_000} MB (ulimit -v), and Python and torch alone map "
            f"{LEAST_ADDRESS_SPACE // 1_000_000} MB: raise that limit"
        )


def control_groups(root: Path = ROOT) -> Iterator[GroupMemory]:
    """Yield limit and use of memory of each control group that has a limit: this process's, then the enclosing ones.

    Page cache that the system can free does not count as used.

    Args:
        root: folder in which /sys and /proc are looked for.
    """
    for group in groups_of("memory", root):
        for limit, usage, freeable in COUNTS:
            most = _number(group / limit)
            if most is not None:
                files = dict(
                    line.split(maxsplit=1) for line in lines_of(group / "memory.stat") if " " in line
                )
                cached = files.get(freeable, "0")
                used = (_number(group / usage) or 0) - (int(cached) if cached.isdigit() else 0)
                yield GroupMemory(most, max(0, used))


def _number(file: Path) -> int | None:
    """Return the integer that a file consists of; None if the file has anything else, such as "max"."""
    text = "".join(lines_of(file)).strip()
    return int(text) if text.isdigit() else None


def _meminfo(name: str, root: Path) -> int | None:
    return _kilobytes(root / "proc/meminfo", name)


def _kilobytes(file: Path, name: str) -> int | None:
    """Return the value of a line "name: N kB" in a file of /proc, converted to bytes; None without that line."""
    for line in lines_of(file):
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None
