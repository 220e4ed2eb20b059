"""The resident pages, which stay for the whole run: unchanged from the files, packed for oneDNN, or copied to a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moesched.models.layout import Page

from ..products.linear import NamedBlocks
from ..products.team import use_cores
from ..shared.page_reader import PageReader
from .adjacent_pages import AdjacentPages
from .compute import Compute

READERS = 2
"""Number of threads that read pages in place: one can read while the other waits for the system to clear memory."""


class ResidentPages:
    """Loads the pages of weights that stay for the whole run, on threads of its own, and keeps them.

    Args:
        compute: packs weights for the CPU, or has the GPU that pages are copied to.

    Attributes:
        awaited: number of pages that are still to be loaded.
    """

    def __init__(self, reader: PageReader, compute: Compute) -> None:
        self._reader = reader
        self._compute = compute
        self._adjacent = None if compute.on_cpu else AdjacentPages(reader, compute)
        self._in_place = True
        self.awaited = 0
        self._pages: dict[int, NamedBlocks] = {}
        self._free: deque[torch.Tensor] = deque()
        self._busy: deque[tuple[int, Future[NamedBlocks]]] = deque()
        self._threads = ThreadPoolExecutor(1)

    def retain(self, pages: Sequence[Page]) -> int:
        """Free all pages but these; returns the number of these pages that are missing and have to be loaded.

        On a GPU, pages that share an allocation are kept or freed together, and memory is allocated for the missing
        pages.
        """
        kept = self._adjacent.retain(pages) if self._adjacent else {page.id for page in pages}
        self._pages = {number: weights for number, weights in self._pages.items() if number in kept}
        if self._adjacent:
            self._adjacent.allocate(pages)
        return len(pages) - len(self._pages)

    def expect(self, count: int, staging: Sequence[torch.Tensor] = ()) -> None:
        """Prepare to load `count` pages, by one call of `load` for each; the last call waits for all of them.

        staging: buffers that pages are read to before they are packed or copied to a GPU; each has a thread of its own.
            Without buffers, pages are read straight into the memory where they stay.
        """
        self.awaited = count
        self._in_place = not staging
        self._free = deque(staging)
        self._threads = ThreadPoolExecutor(len(staging) or READERS, "loading")

    def load(self, page: Page) -> None:
        """Start to load a page that is not in memory yet; the last expected call waits until all pages are loaded."""
        if page.id in self._pages:
            return
        if self._in_place:
            while len(self._busy) >= READERS:
                self._settle_oldest()
            self._busy.append((page.id, self._threads.submit(self._read_in_place, page)))
        else:
            staging = self._free_staging()
            self._busy.append((page.id, self._threads.submit(self._rearranged, page, staging)))
        self.awaited -= 1
        if not self.awaited:
            while self._busy:
                self._settle_oldest()
            self._reader.ahead.give_back()
            self.close()

    def close(self) -> None:
        """Free the staging buffers, and end the threads; pages that are being loaded are dropped."""
        self.awaited = 0
        self._threads.shutdown(cancel_futures=True)
        self._free.clear()
        self._busy.clear()

    def __getitem__(self, page: Page) -> NamedBlocks:
        """Return the tensors of a page of weights by their canonical names, each as row blocks from top to bottom."""
        return self._pages[page.id]

    def memory(self, page: Page, elsewhere: torch.Tensor | None) -> torch.Tensor | None:
        """Return the accelerator's memory for a resident page, uint8, even before the page is loaded.

        elsewhere: the result if the page is not resident, or if the accelerator is the CPU.
        """
        return self._adjacent.memory(page, elsewhere) if self._adjacent else elsewhere

    def _free_staging(self) -> torch.Tensor:
        while not self._free:
            self._settle_oldest()
        return self._free.popleft()

    def _settle_oldest(self) -> None:
        number, loaded = self._busy.popleft()
        self._pages[number] = loaded.result()

    def _read_in_place(self, page: Page) -> NamedBlocks:
        memory = self._reader.new_memory(self._reader.bytes_in_slot(page))
        self._reader.read(page, memory, cached=True)
        return self._reader.views(memory, page)

    def _rearranged(self, page: Page, staging: torch.Tensor) -> NamedBlocks:
        use_cores(1)
        self._reader.read(page, staging, cached=True)
        with torch.inference_mode():
            weights = (
                self._adjacent.copied(page, staging)
                if self._adjacent
                else self._packed(self._reader.views(staging, page))
            )
        self._free.append(staging)
        return weights

    def _packed(self, weights: NamedBlocks) -> NamedBlocks:
        kernels, device = self._compute.kernels, self._compute.accelerator
        return {
            name: [kernels.arranged(name, block, device) for block in blocks]
            for name, blocks in weights.items()
        }
