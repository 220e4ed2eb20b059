"""A cap on a process's memory, its page cache included: a memory cgroup of its own, of either version."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class NoCap(Exception):
    """The system cannot enforce a cap."""


class MemoryCap:
    """A group of processes that may use so much memory together.

    Args:
        folder: of the group.
        files: the names of the files of its limit, its peak, and its events or failures.
    """

    def __init__(self, folder: Path, files: tuple[str, str, str], nbytes: int) -> None:
        self._folder = folder
        self._limit, self._peak, self._events = (folder / name for name in files)
        self._limit.write_text(str(nbytes))
        self._nbytes = nbytes

    def wrapped(self, command: Sequence[str]) -> list[str]:
        """A command that enters the group before it begins."""
        enter = f'echo $$ > "{self._folder / "cgroup.procs"}" && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]

    def report(self) -> dict[str, int | bool]:
        """The limit, the peak, how often the limit was met, and whether it bound."""
        events = self._events.read_text().split()
        met = int(events[events.index("max") + 1] if "max" in events else events[0])
        peak = int(self._peak.read_text())
        binds = met > 0 and peak >= 0.98 * self._nbytes
        return {"limit_bytes": self._nbytes, "peak_bytes": peak, "times_met": met, "binds": binds}


VERSION_2 = ("memory.max", "memory.peak", "memory.events")
VERSION_1 = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt")


@contextmanager
def memory_cap(name: str, nbytes: int) -> Iterator[MemoryCap]:
    """A cap for the processes that `wrapped` starts; they must have ended when it closes.

    Raises:
        NoCap: there are no memory cgroups here, or this user may not make one.
    """
    version_2 = (CGROUPS / "cgroup.controllers").exists()
    folder = CGROUPS / ("" if version_2 else "memory") / f"moesched-{os.getpid()}-{name}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoCap(f"no memory cgroup can be made here: {error.strerror}") from None
    try:
        try:
            cap = MemoryCap(folder, VERSION_2 if version_2 else VERSION_1, nbytes)
        except OSError as error:
            raise NoCap(f"the memory of a cgroup cannot be limited here: {error.strerror}") from None
        yield cap
    finally:
        with suppress(OSError):  # a process may still be ending
            folder.rmdir()


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Have the system forget files, so that whoever reads them next is charged for them."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
