"""A file that is read past the page cache where the system allows it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from moesched.errors import BadInput, MoeschedError

from .arena import ALIGNMENT, round_down

Caching = Literal["bypassed", "dropped", "kept"]


class DirectFile:
    """Positional reads of one file, from any thread; it is opened once.

    `caching` is the effect on the page cache: "bypassed" (O_DIRECT, or F_NOCACHE on macOS), "dropped" (the system
    refuses to bypass it, so each read is dropped from it afterwards) or "kept" (direct=False).

    Raises:
        BadInput: the file cannot be opened.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path = path
        try:
            self._descriptor, self.caching = _open(path, direct)
            reads_cached = self.caching == "bypassed" and hasattr(os, "RWF_NOWAIT")
            self._buffered = os.open(path, os.O_RDONLY) if reads_cached else -1
        except OSError as error:
            raise BadInput(f"cannot open {path}: {error.strerror}; restore it or its permissions") from error

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        """Fill `into` from `offset` on and return the bytes read, at least `needed`: the file may end before.

        The offset, the length and the address of `into` are multiples of 4096. Releases the interpreter lock.

        cached: take what the page cache has from there: a copy in memory is several times as fast as a disk.

        Raises:
            MoeschedError: the disk failed, or the file ends early.
        """
        done = self._read_cached(into, offset) if cached else 0
        try:
            while done < needed:
                count = os.preadv(self._descriptor, [into[done:]], offset + done)
                done += count
                if count == 0 or (done < needed and done % ALIGNMENT):  # the file ends here
                    raise self._ended_early(offset, done, needed)
        except OSError as error:
            where = f"reading {needed} bytes of {self.path} at byte {offset + done}"
            raise MoeschedError(f"{where} failed: {error.strerror}; check the disk and the file") from error
        if self.caching == "dropped":
            os.posix_fadvise(self._descriptor, offset, len(into), os.POSIX_FADV_DONTNEED)
        return done

    def _read_cached(self, into: memoryview, offset: int) -> int:
        """Fill the beginning of `into` from the page cache, as far as that has it, without a wait for the disk."""
        done = 0
        if self._buffered < 0:
            return done
        with suppress(
            OSError
        ):  # BlockingIOError where the cache has nothing, others where the system refuses
            while done < len(into):
                count = round_down(os.preadv(self._buffered, [into[done:]], offset + done, os.RWF_NOWAIT))
                if not count:
                    break
                done += count
        return done

    def require(self, offset: int, needed: int) -> None:
        """Raise MoeschedError if the file no longer holds `needed` bytes from `offset` on."""
        size = os.fstat(self._descriptor).st_size
        if size < offset + needed:
            raise self._ended_early(offset, size - offset, needed)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        for descriptor in (self._descriptor, self._buffered):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._buffered = -1

    def _ended_early(self, offset: int, done: int, needed: int) -> MoeschedError:
        return MoeschedError(
            f"{self.path} ends at byte {offset + done}, but {needed} bytes at byte {offset} are needed; "
            "it was cut short since it was opened: restore it and run again"
        )


def _open(path: Path, direct: bool) -> tuple[int, Caching]:
    if direct and hasattr(os, "O_DIRECT"):
        descriptor = _open_direct(path)
        if descriptor is not None:
            return descriptor, "bypassed"
    descriptor = os.open(path, os.O_RDONLY)
    if not direct:
        return descriptor, "kept"
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return descriptor, "bypassed"
    return descriptor, "dropped" if hasattr(os, "posix_fadvise") else "kept"


def _open_direct(path: Path) -> int | None:
    """A descriptor that reads 4096-aligned blocks directly, or None where the file system refuses."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        # Some systems accept the flag and refuse the read, or ask for larger blocks than 4096 bytes.
        with mmap.mmap(-1, 2 * ALIGNMENT) as block, memoryview(block) as view:
            os.preadv(descriptor, [view[ALIGNMENT:]], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
