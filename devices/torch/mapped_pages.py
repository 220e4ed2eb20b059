"""Pages in the system's page cache: mapped into the process while they are needed, never copied."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path

import torch

from moesched.errors import BadInput, MoeschedError
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.steps.memory import Slot

from ..shared.page_location import Run
from ..shared.page_reader import DTYPES, PageReader
from .file_lease import FileLease
from .resident_pages import Weights

POPULATE_READ = 22  # Python's mmap module has no name for it
DONT_NEED = 4


class MappedPages:
    """Pages of a checkpoint that the page cache is expected to hold, such as one that was just read.

    A slot maps a part of a file instead of holding a copy of it, until it gets another page. So the process has mapped
    at most as much as the slots may hold, rounded up to the system's pages. A kernel that still reads a page that its
    slot has dropped gets the same bytes, a little later.

    A process that reads a mapped part of a file after it was cut off is ended by the system. So a lease on each file
    holds up whoever wants to write to it, and the next page that is brought in reports that. This holds as long as
    pages are brought in more often than every 45 seconds, after which the system gives way to the writer.

    reader: locates the blocks of a page in the files.
    bytes_mapped: bytes of all pages that were brought into slots so far, in whole blocks.

    Raises:
        OSError: the system refuses a lease on a file.
        MoeschedError: a file is shorter than it was.
    """

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, reader: PageReader) -> None:
        self.bytes_mapped = 0
        self._reader = reader
        self._leases: dict[Path, FileLease] = {}
        self._files: dict[Path, torch.Tensor] = {}
        try:
            self._hold_files(layout)
            self._views = {
                page.id: self._view(checkpoint, page, DTYPES[layout.dtype]) for page in layout.pages
            }
        except BaseException:
            self._release()
            raise
        self._shown: dict[Slot, Page] = {}

    @staticmethod
    def possible(reader: PageReader) -> bool:
        """Whether the system can populate mappings (Linux 5.14), and kernels can use the files' bytes as they are."""
        return reader.on_disk and not reader.converts and system_takes(POPULATE_READ)

    def bring(self, page: Page, slot: Slot) -> None:
        """Map a page into a slot, and have the system read what its cache lacks; one thread at a time per slot.

        Raises:
            MoeschedError: another process writes to a file, or the disk failed.
        """
        before = self._shown.pop(slot, None)
        if before is not None:
            self._advise(before, DONT_NEED)
        for run in self._reader.location(page).runs:
            self._leases[run.file.path].require()
        self._shown[slot] = page
        self._advise(page, POPULATE_READ)
        self.bytes_mapped += sum(self._memory(run)[1] for run in self._reader.location(page).runs)

    def views(self, page: Page) -> Weights:
        """The page's tensors by their canonical names, as row blocks from top to bottom."""
        return self._views[page.id]

    def hide(self) -> None:
        """Drop the pages of all slots."""
        for page in self._shown.values():
            self._advise(page, DONT_NEED)
        self._shown.clear()

    def close(self) -> None:
        """Close the files, and let others write to them."""
        self.hide()
        self._views.clear()
        self._files.clear()
        self._release()

    def _hold_files(self, layout: WeightLayout) -> None:
        """Take a lease on each file, and require that none is too short: from then on they stay as they are."""
        runs = [run for page in layout.pages for run in self._reader.location(page).runs]
        for path in sorted({run.file.path for run in runs}):
            self._leases[path] = FileLease(path)
        for run in runs:
            run.file.require(run.offset, run.needed)

    def _release(self) -> None:
        for lease in self._leases.values():
            lease.close()
        self._leases.clear()

    def _view(self, checkpoint: Checkpoint, page: Page, dtype: torch.dtype) -> Weights:
        views: Weights = {}
        for extent in page.extents:
            stored = checkpoint.tensors[extent.tensor]
            row_bytes = stored.nbytes // stored.shape[0]
            start = stored.offset + extent.rows[0] * row_bytes
            raw = self._file(stored.file)[start : start + extent.nbytes]
            shape = (extent.rows[1] - extent.rows[0], *stored.shape[1:])
            views.setdefault(extent.tensor, []).append(raw.view(dtype).view(shape))
        return views

    def _file(self, path: Path) -> torch.Tensor:
        if path not in self._files:
            self._files[path] = _mapped(path)
        return self._files[path]

    def _advise(self, page: Page, advice: int) -> None:
        for run in self._reader.location(page).runs:
            error = _madvise(*self._memory(run), advice)
            if error:
                raise MoeschedError(
                    f"mapping {run.needed} bytes of {run.file.path} at byte {run.offset} failed: "
                    f"{os.strerror(error)}; check the disk and the file"
                )

    def _memory(self, run: Run) -> tuple[int, int]:
        """Address and bytes of a run, within the file."""
        file = self._files[run.file.path]
        return file.data_ptr() + run.offset, min(run.nbytes, len(file) - run.offset)


@cache
def system_takes(advice: int) -> bool:
    """Whether the system takes that advice about memory; by these numbers it is Linux's."""
    if sys.platform != "linux":
        return False
    page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    return _madvise(page.data_ptr(), mmap.PAGESIZE, advice) == 0


def _mapped(path: Path) -> torch.Tensor:
    """Map a file, as uint8; nothing is read yet."""
    # Private, hence writable: torch warns of read-only memory.
    how = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    try:
        with path.open("rb") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, **how), dtype=torch.uint8)
    except OSError as error:
        raise BadInput(f"cannot map {path}: {error.strerror}; restore it or its permissions") from error


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
