"""A file that is mapped into the process from the page cache, with a lease that delays writers."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from moesched.errors import BadInput, MoeschedError, OutOfMemory
from moesched.system.memory_advice import advise

from .file_lease import FileLease


class MappedFile:
    """A file that is mapped as a whole; the system reads a part of it when `advise` or the process asks for the part.

    If another process truncates the file, the system kills a process that reads the lost part. Therefore a lease delays
    processes that want to write, by up to 45 seconds, and `require` reports them.

    Args:
        remedy: advice for a user who has to write to the file, or has too little memory to map it.

    Raises:
        OSError: the system refuses the lease.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        self.path = path
        self._remedy = remedy
        self._lease = FileLease(path, remedy)

    @cached_property
    def bytes(self) -> torch.Tensor:
        """The file's bytes, uint8, for reading only. The file stays mapped as long as a view of these bytes exists.

        Raises:
            BadInput: the system refuses the mapping.
        """
        return _mapped(self.path)

    def require(self) -> None:
        """Raise MoeschedError if another process has opened the file to write since the lease was taken."""
        self._lease.require()

    def advise(self, offset: int, nbytes: int, advice: int) -> None:
        """Call `madvise` for a part of the mapped file, in whole pages of memory; other threads run meanwhile.

        Args:
            offset: index of the part's first byte in the file.
            nbytes: number of bytes.
            advice: number of the advice, such as POPULATE_READ.

        Raises:
            OutOfMemory: the system has no memory for that part.
            MoeschedError: that part of the file cannot be read.
        """
        nbytes = min(nbytes, len(self.bytes) - offset)
        error = advise(self.bytes.data_ptr() + offset, nbytes, advice)
        if not error:
            return
        failed = f"mapping {nbytes} bytes of {self.path} at byte {offset} failed: {os.strerror(error)}"
        if error == errno.ENOMEM:
            raise OutOfMemory(
                f"{failed}; give the container or virtual machine more memory, or {self._remedy}"
            )
        raise MoeschedError(f"{failed}; check the disk and the file")

    def close(self) -> None:
        """Give up the lease."""
        self._lease.close()


def _mapped(path: Path) -> torch.Tensor:
    """Map a file for reading; returns its bytes, uint8.

    The mapping is shared, since the system would copy pinned pages of a private mapping.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise BadInput(f"cannot map {path}: {error.strerror}; restore it or its permissions") from error
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    memory = (ctypes.c_uint8 * len(mapping)).from_address(address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # which lives as long as the memory is in use
    return torch.frombuffer(memory, dtype=torch.uint8)
