"""A file in the page cache, mapped into the process, to which no process writes meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

from moesched.errors import BadInput, MoeschedError

from .file_lease import FileLease

POPULATE_READ = 22  # Python's mmap module has no name for it
DONT_NEED = 4


class MappedFile:
    """A file that is mapped as a whole; nothing is read before `advise` asks for it, or somebody reads.

    A process that reads a mapped part of a file after it was cut off is ended by the system. So a lease holds up
    whoever wants to write to it, and `require` reports that. The system gives way to the writer after 45 seconds.

    Args:
        remedy: what a user can do who has to write to the file.

    Raises:
        OSError: the system refuses the lease.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        self.path = path
        self._lease = FileLease(path, remedy)

    @cached_property
    def bytes(self) -> torch.Tensor:
        """The file's bytes (uint8), only to be read; the mapping lasts as long as one of their views.

        Raises:
            BadInput: the system refuses the mapping.
        """
        return _mapped(self.path)

    def require(self) -> None:
        """Raise MoeschedError if another process waits to write to the file, or has been let through."""
        self._lease.require()

    def advise(self, offset: int, nbytes: int, advice: int) -> None:
        """Advise the system about a part of the mapping, in whole blocks; other Python threads run meanwhile.

        Raises:
            MoeschedError: it cannot be read.
        """
        nbytes = min(nbytes, len(self.bytes) - offset)
        error = _madvise(self.bytes.data_ptr() + offset, nbytes, advice)
        if error:
            raise MoeschedError(
                f"mapping {nbytes} bytes of {self.path} at byte {offset} failed: {os.strerror(error)}; "
                "check the disk and the file"
            )

    def close(self) -> None:
        """Give up the lease."""
        self._lease.close()


@cache
def system_takes(advice: int) -> bool:
    """True if the system accepts that advice about memory; its numbers are those of Linux."""
    if sys.platform != "linux":
        return False
    page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    return _madvise(page.data_ptr(), mmap.PAGESIZE, advice) == 0


def _mapped(path: Path) -> torch.Tensor:
    """Map a file, as uint8. The mapping is shared: the system copies pinned pages of private ones."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise BadInput(f"cannot map {path}: {error.strerror}; restore it or its permissions") from error
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    memory = (ctypes.c_uint8 * len(mapping)).from_address(address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # which lives as long as the memory is in use
    return torch.frombuffer(memory, dtype=torch.uint8)


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """Advise the system about whole pages of memory; returns 0, or the error number.

    Unlike the mmap module's function, it lets other threads run meanwhile.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + nbytes - start)
    return ctypes.get_errno() if _library().madvise(ctypes.c_void_p(start), size, advice) else 0


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
