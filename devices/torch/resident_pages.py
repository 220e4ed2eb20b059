"""The pages that stay for the whole run: as they were read, or rearranged for oneDNN or another device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moesched.models.layout import Page

from ..products.team import use_cores
from ..shared.page_reader import PageReader

Weights = dict[str, list[torch.Tensor]]
Arrange = Callable[[str, torch.Tensor], torch.Tensor]

READERS = 2
"""Threads that read pages in place; one waits for the system to clear memory while the other reads."""


class ResidentPages:
    """Reads pages one after the other, on threads of its own."""

    def __init__(self, reader: PageReader) -> None:
        self._reader = reader
        self._arrange: Arrange | None = None
        self._awaited = 0
        self._pages: dict[int, Weights] = {}
        self._free: deque[torch.Tensor] = deque()
        self._busy: deque[tuple[int, Future[Weights]]] = deque()
        self._threads = ThreadPoolExecutor(1)

    def retain(self, pages: Iterable[Page]) -> int:
        """Free all pages but these; returns the number of these that are not in memory yet."""
        wanted = {page.id for page in pages}
        self._pages = {number: weights for number, weights in self._pages.items() if number in wanted}
        return len(wanted) - len(self._pages)

    def expect(
        self, count: int, arrange: Arrange | None = None, staging: Sequence[torch.Tensor] = ()
    ) -> None:
        """Prepare to load `count` pages; the last `load` returns when all of them are there.

        Args:
            arrange: returns the copy that is kept of a tensor, by its name; None keeps pages where they are read to.
            staging: buffers that pages to be rearranged are read into, by a thread for each.
        """
        self._awaited = count
        self._arrange = arrange
        self._free = deque(staging)
        self._threads = ThreadPoolExecutor(len(staging) if arrange else READERS, "loading")

    def load(self, page: Page) -> None:
        """Load a page that is not here yet; on return it may still be on its way, unless it is the last one."""
        if page.id in self._pages:
            return
        if self._arrange is None:
            while len(self._busy) >= READERS:
                self._settle_oldest()
            self._busy.append((page.id, self._threads.submit(self._read_in_place, page)))
        else:
            staging = self._free_staging()
            self._busy.append((page.id, self._threads.submit(self._rearranged, page, staging, self._arrange)))
        self._awaited -= 1
        if not self._awaited:
            while self._busy:
                self._settle_oldest()
            self._reader.ahead.give_back()
            self.close()

    def close(self) -> None:
        """Free the staging memory and the threads; pages in transfer are lost."""
        self._threads.shutdown(cancel_futures=True)
        self._free.clear()
        self._busy.clear()

    def __getitem__(self, page: Page) -> Weights:
        """The tensors of a page by their canonical names, as row blocks from top to bottom."""
        return self._pages[page.id]

    def _free_staging(self) -> torch.Tensor:
        while not self._free:
            self._settle_oldest()
        return self._free.popleft()

    def _settle_oldest(self) -> None:
        number, loaded = self._busy.popleft()
        self._pages[number] = loaded.result()

    def _read_in_place(self, page: Page) -> Weights:
        memory = self._reader.new_memory(self._reader.bytes_in_slot(page))
        self._reader.read(page, memory, cached=True)
        return self._reader.views(memory, page)

    def _rearranged(self, page: Page, staging: torch.Tensor, arrange: Arrange) -> Weights:
        use_cores(1)
        self._reader.read(page, staging, cached=True)
        with torch.inference_mode():
            weights = {
                name: [arrange(name, block) for block in blocks]
                for name, blocks in self._reader.views(staging, page).items()
            }
        self._free.append(staging)
        return weights
