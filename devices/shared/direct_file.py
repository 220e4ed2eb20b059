"""Reads of a file past the page cache, where the system allows them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from moesched.errors import BadInput, MoeschedError
from moesched.models.checkpoint import Blocks

from .arena import ALIGNMENT, round_down

MOST_AT_ONCE = 1 << 30
"""Largest number of bytes of one read; macOS refuses reads of 2 GiB and more."""

MOST_BYTES = 1 << 20
"""Largest number of bytes of a part, where a read is cut into parts for several threads."""

_F_NOCACHE: int | None = getattr(fcntl, "F_NOCACHE", None)

Caching = Literal["bypassed", "dropped", "kept"]


def _no_cache(descriptor: int) -> None:
    assert _F_NOCACHE is not None, "only where the system has it"
    fcntl.fcntl(descriptor, _F_NOCACHE, 1)


def _drop(descriptor: int, offset: int, nbytes: int) -> None:
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


class Ways(NamedTuple):
    """The system's functions and flags for reading files.

    Attributes:
        preadv: function that reads from a file into buffers, with the arguments of `os.preadv`.
        direct: the flag that opens a file for reads past the page cache; None on macOS.
        no_cache: function (descriptor) that keeps later reads out of the page cache; None on Linux.
        drop: function (descriptor, offset, nbytes) that drops a range of a file from the page cache; None on macOS.
    """

    preadv: Callable[..., int] = os.preadv
    direct: int | None = getattr(os, "O_DIRECT", None)
    no_cache: Callable[[int], object] | None = None if _F_NOCACHE is None else _no_cache
    drop: Callable[[int, int, int], object] | None = _drop if hasattr(os, "posix_fadvise") else None


HERE = Ways()
"""The functions and flags of this system."""


class DirectFile:
    """A file that is opened once for positional reads, past the page cache if possible; any thread may read.

    Args:
        direct: True to read past the page cache.
        ways: the system's functions for reading files.

    Attributes:
        caching: the effect of reads on the page cache. "bypassed": reads go past it, by O_DIRECT or, on macOS,
            F_NOCACHE. "dropped": the system refuses such reads, so the bytes of each read are dropped from the page
            cache afterwards. "kept": the bytes stay there.

    Raises:
        BadInput: the file cannot be opened.
    """

    def __init__(self, path: Path, *, direct: bool = True, ways: Ways = HERE) -> None:
        self.path = path
        self._ways = ways
        self._descriptor = self._buffered = -1
        try:
            self._descriptor, self.caching = _open(path, direct, ways)
            if self.caching == "bypassed" and hasattr(os, "RWF_NOWAIT"):
                self._buffered = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.close()
            raise BadInput(f"cannot open {path}: {error.strerror}; restore it or its permissions") from error

    @property
    def descriptor(self) -> int:
        """Descriptor with which other code can read the file past the page cache; -1 if that is not possible.

        It is -1, too, if `ways` are not the functions and flags of this system.
        """
        return self._descriptor if self.caching == "bypassed" and self._ways is HERE else -1

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        """Fill `into` with the file's bytes from `offset` on; returns the number of bytes read.

        Other Python threads run meanwhile.

        Args:
            into: memory to fill; its address and length are multiples of 4096.
            offset: a multiple of 4096.
            needed: number of bytes that must be read; the others may be missing where the file ends.
            cached: True to read from the page cache up to the first block missing there, and the rest from the disk.
                The page cache is several times as fast as a disk.

        Raises:
            MoeschedError: the disk failed, or the file ends early.
        """
        done = self._read_cached(into, offset) if cached else 0
        try:
            while done < needed:
                count = self._ways.preadv(self._descriptor, [into[done : done + MOST_AT_ONCE]], offset + done)
                done += count
                if count == 0 or (done < needed and done % ALIGNMENT):  # the file ends here
                    raise self._ended_early(offset, done, needed)
        except OSError as error:
            where = f"reading {needed} bytes of {self.path} at byte {offset + done}"
            raise MoeschedError(f"{where} failed: {error.strerror}; check the disk and the file") from error
        if self.caching == "dropped" and self._ways.drop is not None:
            self._ways.drop(self._descriptor, offset, len(into))
        return done

    def _read_cached(self, into: memoryview, offset: int) -> int:
        """Fill `into` from the page cache, up to the first block that is not there; returns the number of bytes."""
        done = 0
        if self._buffered < 0:
            return done
        with suppress(OSError):  # BlockingIOError if the cache has nothing, others if the system refuses
            while done < len(into):
                buffers = [into[done : done + MOST_AT_ONCE]]
                count = round_down(os.preadv(self._buffered, buffers, offset + done, os.RWF_NOWAIT))
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


@dataclass(slots=True)
class BlockRead:
    """A read of consecutive blocks of a file; calling it reads them, and returns the number of bytes read.

    Attributes:
        file: the file to read.
        into, offset, needed: the arguments of `DirectFile.read`.
        note: function to call with the number of bytes read; None for no function.
        cached: True to take from the page cache the bytes that it has.
    """

    file: Blocks
    into: memoryview
    offset: int
    needed: int
    note: Callable[[int], object] | None = None
    cached: bool = False

    def __call__(self) -> int:
        nbytes = self.file.read(self.into, self.offset, self.needed, cached=self.cached)
        if self.note is not None:
            self.note(nbytes)
        return nbytes


def parts_of(into: memoryview, offset: int, needed: int) -> Iterator[tuple[memoryview, int, int]]:
    """Cut a `DirectFile.read` into reads of at most 1 MiB; yields the arguments (into, offset, needed) of each read."""
    for start in range(0, len(into), MOST_BYTES):
        part = into[start : start + MOST_BYTES]
        yield part, offset + start, min(needed - start, len(part))


class AbsentFile:
    """A stand-in for a file of which only the header is on this machine; every read of it fails."""

    caching: Caching = "bypassed"
    descriptor = -1

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, into: memoryview, offset: int, needed: int, *, cached: bool = False) -> int:
        """Raise MoeschedError, since the file is absent."""
        raise MoeschedError(f"{self.path} is not here: copy the file to this machine")

    def require(self, offset: int, needed: int) -> None:
        """Raise MoeschedError, since the file is absent."""
        self.read(memoryview(b""), offset, needed)

    def close(self) -> None:
        """Do nothing."""


def _open(path: Path, direct: bool, ways: Ways) -> tuple[int, Caching]:
    if direct and ways.direct is not None:
        descriptor = _open_direct(path, ways.direct)
        if descriptor is not None:
            return descriptor, "bypassed"
    descriptor = os.open(path, os.O_RDONLY)
    if not direct:
        return descriptor, "kept"
    if ways.no_cache is not None:
        ways.no_cache(descriptor)
        return descriptor, "bypassed"
    return descriptor, "kept" if ways.drop is None else "dropped"


def _open_direct(path: Path, flag: int) -> int | None:
    """Open a file with `flag` for direct reads of 4096-byte blocks; returns its descriptor; None if refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | flag)
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
