"""Pages of weights that are held in the host's memory, page-locked or not, for several batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moesched.errors import MoeschedError, OutOfMemory
from moesched.models.layout import Page
from moesched.seams import Progress

from ..products.linear import Tensor
from ..shared.arena import aligned_bytes
from ..shared.page_reader import PagePart, PageReader
from .loading import load_each


class HeldPage(NamedTuple):
    """A page of weights in the host's memory.

    Attributes:
        parts: pieces of memory with the page's bytes; the field `at` of each is the offset of its bytes in a slot.
        locked: whether the memory is page-locked, so that a GPU copies from it directly.
    """

    parts: Sequence[PagePart]
    locked: bool

    @classmethod
    def whole(cls, memory: Tensor, *, locked: bool) -> HeldPage:
        """Make a `HeldPage` from one piece of memory with all bytes of a page. locked: whether it is page-locked."""
        return cls((PagePart(0, memory),), locked)


class CannotHold(MoeschedError):
    """An error: pages cannot be held in a certain way, such as page-locked; the message has the reason and a remedy."""


class HeldPages:
    """Holds pages of weights in the host's memory, each in an allocation of its own.

    Args:
        threads: number of threads that read pages.
        allocate: a function that takes a number of bytes, and returns a uint8 tensor with as many, at an address that
            is a multiple of 4096.
        locked: whether the memory that `allocate` returns is page-locked, so that a GPU copies from it directly.
    """

    def __init__(
        self, reader: PageReader, threads: int, allocate: Callable[[int], Tensor], *, locked: bool
    ) -> None:
        self._reader = reader
        self._threads = threads
        self._allocate = allocate
        self._locked = locked
        self._pages: dict[int, HeldPage] = {}

    def hold(self, pages: Sequence[Page], tell: Progress) -> None:
        """Hold these pages and no others: free the others, and read those that are missing. An error frees all pages.

        tell: is called with the progress of reading.

        Raises:
            CannotHold: the system refused to lock memory.
            MoeschedError: a file cannot be read.
        """
        here, self._pages = self._pages, {}
        kept = {page.id: here[page.id] for page in pages if page.id in here}
        here.clear()
        missing = [page for page in pages if page.id not in kept]
        sizes = list(map(self._reader.bytes_in_slot, missing))
        try:
            read = load_each(self._read, missing, sizes, self._threads, tell)
        except OutOfMemory as error:
            raise CannotHold(str(error)) from error
        self._pages = kept | {page.id: held for page, held in zip(missing, read, strict=True)}

    def get(self, page: Page) -> HeldPage | None:
        """Return a held page's memory and whether it is page-locked; None if the page is not held."""
        return self._pages.get(page.id)

    def _read(self, page: Page) -> HeldPage:
        memory = read_page(self._reader, page, self._allocate, cached=True)
        return HeldPage.whole(memory, locked=self._locked)


def read_page(
    reader: PageReader,
    page: Page,
    allocate: Callable[[int], Tensor] = aligned_bytes,
    *,
    cached: bool = False,
) -> Tensor:
    """Read a page from the files into new memory; returns the memory, uint8.

    Args:
        allocate: a function that takes a number of bytes, and returns a uint8 tensor with as many.
        cached: whether to take bytes from the system's page cache where it has them.
    """
    memory = allocate(reader.bytes_in_slot(page))
    reader.read(page, memory, cached=cached)
    return memory
