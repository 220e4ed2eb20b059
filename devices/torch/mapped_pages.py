"""Pages of weights in the system's page cache, which are mapped into the process instead of copied."""

from __future__ import annotations

from pathlib import Path

from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.steps.memory import Slot
from moesched.system.memory_advice import DONT_NEED, POPULATE_READ, system_takes

from ..products.linear import NamedBlocks
from ..shared.page_reader import PageReader, block_of
from .mapped_file import MappedFile

REMEDY = "run with --device-set direct=true"
"""Advice for users who have to write to a file during a run."""


class MappedPages:
    """The pages of a checkpoint, mapped from the system's page cache, which is expected to contain them.

    A slot of a pool has no copy of a page: it stands for the mapping of the page, until the slot gets another page. So
    the process has at most as many pages mapped in memory as there are slots. If a slot gets another page while a
    kernel reads the earlier one, the kernel still reads the right bytes, only more slowly.

    If another process wants to write to a file, the next call of `bring` raises an error. The system lets that process
    write after 45 seconds, so `bring` has to be called more often than that.

    Args:
        reader: locates the blocks of a page in the files.

    Attributes:
        bytes_mapped: bytes of all pages that were brought into slots so far, in whole blocks.

    Raises:
        OSError: the system refuses a lease on a file.
        MoeschedError: a file is shorter than it was.
    """

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, reader: PageReader) -> None:
        self.bytes_mapped = 0
        self._reader = reader
        self._files: dict[Path, MappedFile] = {}
        try:
            self._hold_files(layout)
            self._views = {page.id: self._view(checkpoint, page) for page in layout.pages}
        except BaseException:
            self._release()
            raise
        self._shown: dict[Slot, Page] = {}

    @staticmethod
    def possible(reader: PageReader) -> bool:
        """Test whether kernels can read weights as stored, and Linux (5.14 or later) can read mapped files ahead."""
        return not reader.converts and system_takes(POPULATE_READ)

    def bring(self, page: Page, slot: Slot) -> None:
        """Let a slot stand for a page, and make the system read those parts of it that the page cache lacks.

        Only one thread at a time may call this for a slot. The slot's earlier page may be dropped from memory.

        Raises:
            MoeschedError: another process writes to a file, or the disk failed.
        """
        before = self._shown.pop(slot, None)
        if before is not None:
            self._advise(before, DONT_NEED)
        for run in self._reader.location(page).runs:
            self._files[run.file.path].require()
        self._shown[slot] = page
        self._advise(page, POPULATE_READ)
        self.bytes_mapped += sum(
            min(run.nbytes, len(self._files[run.file.path].bytes) - run.offset)
            for run in self._reader.location(page).runs
        )

    def views(self, page: Page) -> NamedBlocks:
        """Return the tensors of a page of weights by their canonical names, each as row blocks from top to bottom."""
        return self._views[page.id]

    def hide(self) -> None:
        """Empty all slots, so that the system may drop the slots' pages from the process's memory."""
        for page in self._shown.values():
            self._advise(page, DONT_NEED)
        self._shown.clear()

    def close(self) -> None:
        """Close the files, and give up their leases."""
        self.hide()
        self._views.clear()
        self._release()

    def _hold_files(self, layout: WeightLayout) -> None:
        """Take a lease on each file with pages, to delay processes that write, and check that no file is too short."""
        runs = [run for page in layout.pages for run in self._reader.location(page).runs]
        for path in sorted({run.file.path for run in runs}):
            self._files[path] = MappedFile(path, REMEDY)
        for run in runs:
            run.file.require(run.offset, run.needed)

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _view(self, checkpoint: Checkpoint, page: Page) -> NamedBlocks:
        views: NamedBlocks = {}
        for extent in page.extents:
            stored = checkpoint.tensors[extent.tensor]
            start = stored.offset + extent.rows[0] * stored.row_bytes
            raw = self._files[stored.file].bytes[start : start + extent.nbytes]
            shape = (extent.rows[1] - extent.rows[0], *stored.shape[1:])
            views.setdefault(extent.tensor, []).append(block_of(raw, shape, stored.format))
        return views

    def _advise(self, page: Page, advice: int) -> None:
        for run in self._reader.location(page).runs:
            self._files[run.file.path].advise(run.offset, run.nbytes, advice)
