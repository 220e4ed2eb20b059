"""The home of weights in the page cache: a GPU copies pages directly from mapped files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesched.models.layout import Page
from moesched.seams import Progress

from ..shared.page_reader import PagePart, PageReader
from .held_pages import HeldPage
from .registered_files import RegisteredFiles, spans_of


class MappedHome:
    """Holds pages in files that are mapped and registered with CUDA, so that a GPU copies them from the page cache.

    A page may have parts at several places in the files. Parts are rounded to whole blocks of `BLOCK` bytes. Parts that
    then adjoin or overlap are registered together, so that no block is registered twice. A lease on each file delays
    other processes that want to write to it. `get` checks that no process has opened the page's files for writing.

    Args:
        threads: number of threads that make the system read the parts of files that the page cache lacks.

    Attributes:
        bytes_mapped: bytes of all pages that were registered here so far, in whole blocks.
    """

    def __init__(self, reader: PageReader, threads: int, device: torch.device) -> None:
        self.bytes_mapped = 0
        self._reader = reader
        self._files = RegisteredFiles(threads, device)
        self._pages: dict[int, HeldPage] = {}

    @staticmethod
    def obstacle(reader: PageReader) -> str:
        """Return the reason why a GPU cannot use pages as they are in the files of `reader`; empty if it can."""
        if reader.converts:
            return "the files have the weights in another form than the kernels"
        return "" if RegisteredFiles.possible() else "mapped files need Linux 5.14 or later"

    def hold(self, pages: Sequence[Page], tell: Progress) -> None:
        """Hold these pages and no others: register them, and undo other registrations. An error undoes them all.

        No copy of a page may be under way.

        tell: is called with the progress of reading.

        Raises:
            CannotHold: the system gives no lease on a file, or CUDA does not register it.
            MoeschedError: a file is shorter than it was, or cannot be read.
        """
        before, self._pages = self._pages, {}
        runs = [run for page in pages for run in self._reader.location(page).runs]
        spans = spans_of((run.file.path, run.offset, run.nbytes) for run in runs)
        try:
            self._files.keep(spans)
            for run in runs:
                run.file.require(run.offset, run.needed)
            self._files.register(spans, tell)
            self._pages = {page.id: self._held(page) for page in pages}
        except BaseException:
            self._files.close()
            raise
        self.bytes_mapped += sum(
            self._reader.location(page).bytes_to_read for page in pages if page.id not in before
        )

    def get(self, page: Page) -> HeldPage | None:
        """Return a held page; None if the page is not held.

        The page has to be copied right after this call, as the lease that the call checks delays writers only for some
        time.

        Raises:
            MoeschedError: another process writes to one of the page's files.
        """
        held = self._pages.get(page.id)
        if held is not None:
            for path in {run.file.path for run in self._reader.location(page).runs}:
                self._files[path].require()
        return held

    def _held(self, page: Page) -> HeldPage:
        parts = [
            PagePart(run.at, self._files[run.file.path].bytes[run.offset : run.offset + run.nbytes])
            for run in self._reader.location(page).runs
        ]
        return HeldPage(parts, locked=True)
