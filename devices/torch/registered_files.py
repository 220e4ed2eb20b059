"""The registration of parts of files with CUDA, so that a GPU copies them directly from the page cache."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moesched.errors import BadInput
from moesched.seams import Progress
from moesched.system.memory_advice import POPULATE_READ, system_takes
from moesched.units import format_bytes

from ..shared.arena import ALIGNMENT
from .held_pages import CannotHold
from .loading import load_each
from .locked_memory import PORTABLE, READ_ONLY, NotLocked, lock
from .mapped_file import MappedFile

BLOCK = max(ALIGNMENT, mmap.PAGESIZE)
"""Bytes of a block; registered parts are whole blocks."""

PIECE_BYTES = 32 << 20
"""Bytes that a thread makes the system read at a time."""

REMEDY = "run with --device-set map_files=false"
"""Advice for users who have to write to a file during a run."""


class FileSpan(NamedTuple):
    """A part of a file, from byte `start` to before byte `end`, which are multiples of `BLOCK`."""

    path: Path
    start: int
    end: int


class RegisteredFiles:
    """Files that are mapped read-only, protected by leases, and registered with CUDA in parts.

    A registered part stays in memory, and the process itself does not read it. So neither the process nor the GPU fails
    if a file is truncated in spite of the lease.

    Args:
        threads: number of threads that make the system read the parts of files that the page cache lacks.
        device: the GPU's torch device.
    """

    def __init__(self, threads: int, device: torch.device) -> None:
        self._threads = threads
        self._device = device
        self._files: dict[Path, MappedFile] = {}
        self._registered: dict[FileSpan, Callable[[], None]] = {}
        """The function that unregisters each span."""

    @staticmethod
    def possible() -> bool:
        """Test whether the system reads mapped files ahead on request, as Linux 5.14 and later do."""
        return system_takes(POPULATE_READ)

    def __getitem__(self, path: Path) -> MappedFile:
        return self._files[path]

    def keep(self, spans: Sequence[FileSpan]) -> None:
        """Keep these spans and no others: open their files, unregister other spans, and close other files.

        Raises:
            CannotHold: the system gives no lease on a file.
        """
        for span in self._registered.keys() - set(spans):
            self._registered.pop(span)()
        wanted = {span.path for span in spans}
        for path in self._files.keys() - wanted:
            self._files.pop(path).close()
        for path in sorted(wanted - self._files.keys()):
            try:
                self._files[path] = MappedFile(path, REMEDY)
            except OSError as error:
                raise CannotHold(
                    f"the system gives no lease on {path} ({error.strerror}): own the model's files, put them on a "
                    "local disk, and end programs that write to them"
                ) from error

    def register(self, spans: Sequence[FileSpan], tell: Progress) -> None:
        """Read the spans that are not registered yet into the page cache, and register them with CUDA.

        No two spans may have a block in common, and `keep` must have opened their files.

        tell: is called with the progress of reading.

        Raises:
            CannotHold: the system does not map a file or has no memory for it, or CUDA does not register it.
            MoeschedError: a file cannot be read.
        """
        fresh = [span for span in spans if span not in self._registered]
        pieces = [
            (path, start, min(PIECE_BYTES, end - start))
            for path, first, end in fresh
            for start in range(first, end, PIECE_BYTES)
        ]
        try:
            load_each(self._read, pieces, [nbytes for _, _, nbytes in pieces], self._threads, tell)
        except BadInput as error:
            raise CannotHold(str(error)) from error
        for span in fresh:
            self._register(span)

    def close(self) -> None:
        """Unregister all spans, and close all files; no copy from the files may be under way."""
        self.keep(())

    def _read(self, piece: tuple[Path, int, int]) -> None:
        path, start, nbytes = piece
        self._files[path].advise(start, nbytes, POPULATE_READ)

    def _register(self, span: FileSpan) -> None:
        address, nbytes = self._files[span.path].bytes.data_ptr() + span.start, span.end - span.start
        try:
            self._registered[span] = lock(address, nbytes, self._device, PORTABLE | READ_ONLY)
        except NotLocked as refusal:
            raise CannotHold(
                f"CUDA registers no {format_bytes(nbytes)} of {span.path} ({refusal}): put the model on a local disk, "
                "update the driver, or give the container or virtual machine more memory"
            ) from refusal


def spans_of(ranges: Iterable[tuple[Path, int, int]]) -> list[FileSpan]:
    """Return the fewest spans of whole blocks that cover ranges of files; no two of these spans touch.

    ranges: for each range the file's path, the offset of the first byte, and the number of bytes.
    """
    spans: list[FileSpan] = []
    for path, offset, nbytes in sorted(ranges):
        start, end = offset // BLOCK * BLOCK, -(-(offset + nbytes) // BLOCK) * BLOCK
        if spans and spans[-1].path == path and start <= spans[-1].end:
            spans[-1] = spans[-1]._replace(end=max(end, spans[-1].end))
        else:
            spans.append(FileSpan(path, start, end))
    return spans
