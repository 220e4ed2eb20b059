"""Pages that stay in a memory for the whole run: kept there by a plan, or stored there and read by the host."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.models.layout import Page
from moesched.steps.claims import Claim
from moesched.steps.memory import Memory, Pool, Slot
from moesched.steps.model_pages import describe


class FixedPages(Pool):
    """Pages that stay in a memory for the whole run, each in a slot of exactly the page's size."""

    def __init__(self, name: str, memory: Memory, pages: Iterable[Page], sizes: Iterable[int]) -> None:
        super().__init__(name, memory, 0, 0, "none")
        for page, size in zip(pages, sizes, strict=True):
            self._hold(page, size)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots)

    def claims(self, free: int) -> Iterable[Claim]:
        """Return the bytes to reserve: one sum for all pages or, if it exceeds `free`, the bytes of each page.

        The first page whose bytes do not fit is then named in the error.
        """
        total, pages = self.nbytes, len(self._slots)
        if total <= free:
            return [Claim(f"{pages} pages, kept in {self.memory.name}", total)]
        return [
            Claim(
                f"page {describe(slot.page)}, number {slot.index + 1} of {pages} kept in {self.memory.name},",
                slot.nbytes,
            )
            for slot in self._slots
            if slot.page is not None
        ]

    def _hold(self, page: Page, size: int) -> None:
        slot = Slot(self, len(self._slots), size, fixed=True)
        slot.page = page
        self.memory._table[page.id] = self._held[page.id] = slot
        self._slots.append(slot)


class HomePages(FixedPages):
    """Pages in the memory where weights are stored, which the host reads there to compute.

    The pages are there already: nothing loads or moves them, and they claim no further bytes.
    """

    def __init__(self, memory: Memory, pages: Iterable[Page]) -> None:
        super().__init__("home", memory, (), ())
        for page in pages:
            self._hold(page, page.nbytes)
