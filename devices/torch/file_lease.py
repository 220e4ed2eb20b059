"""Leases on files, by which Linux delays processes that want to write to a file in use."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from moesched.errors import MoeschedError


class FileLease:
    """A lease on a file that this process only reads. It delays other processes that want to write to the file.

    A process that opens the file for writing or truncates it waits until the lease is given up, or at most the seconds
    in /proc/sys/fs/lease-break-time, 45 by default. Only the file's owner and privileged processes get a lease, on a
    local file that no process has open for writing.

    Args:
        remedy: advice for a user who has to write to the file, which ends an error's message.

    Raises:
        OSError: the system refuses the lease.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        self._path, self._remedy = path, remedy
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            # The signal that tells of a waiting process would end this one by default; SIGURG does not.
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            os.close(self._descriptor)
            raise

    def require(self) -> None:
        """Raise MoeschedError if another process has opened the file to write since the lease was taken."""
        if fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise MoeschedError(
                f"another process writes to {self._path}, which this run uses in the page cache: change it after the "
                f"run, or {self._remedy}"
            )

    def close(self) -> None:
        """Give up the lease."""
        os.close(self._descriptor)
