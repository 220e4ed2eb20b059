"""The pages that stay for the whole run, rearranged for oneDNN where that pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moesched.models.layout import Page

from ..products.team import use_cores
from ..shared.page_reader import PageReader

Weights = dict[str, list[torch.Tensor]]


class ResidentPages:
    """Reads pages one after the other, on the calling thread, while its own threads rearrange the previous ones.

    arrange: returns the copy of a tensor that is kept.
    """

    def __init__(self, reader: PageReader, arrange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._reader = reader
        self._arrange = arrange
        self._awaited = 0
        self._pages: dict[int, Weights] = {}
        self._free: deque[torch.Tensor] = deque()
        self._busy: deque[tuple[int, torch.Tensor, Future[Weights]]] = deque()
        self._threads = ThreadPoolExecutor(1)

    def retain(self, pages: Iterable[Page]) -> int:
        """Free all pages but these; returns the number of these that are not in memory yet."""
        wanted = {page.id for page in pages}
        self._pages = {number: weights for number, weights in self._pages.items() if number in wanted}
        return len(wanted) - len(self._pages)

    def expect(self, count: int, staging: list[torch.Tensor]) -> None:
        """Prepare to load `count` pages; the last `load` returns when all of them are rearranged.

        staging: buffers that pages are read into; with n buffers, n - 1 pages are rearranged at a time.
        """
        self._awaited = count
        self._free = deque(staging)
        self._threads = ThreadPoolExecutor(max(1, len(staging) - 1), "arranging")

    def load(self, page: Page) -> None:
        """Read a page that is not here yet; on return it may still be rearranged, unless it is the last one."""
        if page.id in self._pages:
            return
        if not self._free:
            self._settle_oldest()
        staging = self._free.popleft()
        self._reader.read(page, staging)
        self._busy.append((page.id, staging, self._threads.submit(self._rearranged, page, staging)))
        self._awaited -= 1
        if not self._awaited:
            while self._busy:
                self._settle_oldest()
            self.close()

    def close(self) -> None:
        """Free the staging memory and the threads; pages in transfer are lost."""
        self._threads.shutdown(cancel_futures=True)
        self._free.clear()
        self._busy.clear()

    def __getitem__(self, page: Page) -> Weights:
        """The tensors of a page by their canonical names, as row blocks from top to bottom."""
        return self._pages[page.id]

    def _settle_oldest(self) -> None:
        number, staging, arranged = self._busy.popleft()
        self._pages[number] = arranged.result()
        self._free.append(staging)

    def _rearranged(self, page: Page, staging: torch.Tensor) -> Weights:
        use_cores(1)
        with torch.inference_mode():
            return {
                name: [self._arrange(block) for block in blocks]
                for name, blocks in self._reader.views(staging, page).items()
            }
