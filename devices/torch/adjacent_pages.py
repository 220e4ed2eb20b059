"""Memory on the accelerator for resident pages of weights; pages of the same expert or dense part are adjacent."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch

from moesched.models.layout import EXTENT_ALIGNMENT, Page

from ..products.linear import NamedBlocks, Tensor
from ..shared.page_reader import PagePart, PageReader
from .compute import Compute


class AdjacentPages:
    """Allocates memory for pages: one allocation for each expert, and one for each layer's other weights (dense part).

    So the row blocks of a matrix that spans several pages are adjacent, and can be joined to one block without a copy.
    """

    def __init__(self, reader: PageReader, compute: Compute) -> None:
        self._reader = reader
        self._compute = compute
        self._slots: dict[int, Tensor] = {}
        """The bytes of each page, by its id."""
        self._together: set[tuple[int, ...]] = set()
        """The ids of the pages in each allocation."""

    def retain(self, pages: Iterable[Page]) -> set[int]:
        """Keep the memory of each expert or dense part whose resident pages stay the same; free all other memory.

        pages: the pages that are resident from now on.

        Returns:
            the ids of the pages whose memory was kept.
        """
        self._together &= {_ids(group) for group in _groups(pages)}
        staying = {page for group in self._together for page in group}
        self._slots = {page: slot for page, slot in self._slots.items() if page in staying}
        return staying

    def allocate(self, pages: Iterable[Page]) -> None:
        """Allocate memory for the pages that have none; `retain` must have been called with the same pages."""
        for group in _groups(pages):
            if _ids(group) not in self._together:
                self._together.add(_ids(group))
                sizes = [-(-page.nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT for page in group]
                memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self._compute.accelerator)
                self._slots |= zip(_ids(group), memory.split(sizes), strict=True)

    def memory(self, page: Page, elsewhere: Tensor | None) -> Tensor | None:
        """Return the memory of a page, uint8; return `elsewhere` if the page has no memory here."""
        return self._slots.get(page.id, elsewhere)

    def copied(self, page: Page, staging: Tensor) -> NamedBlocks:
        """Copy a page to its memory; returns its tensors there. Several threads may copy different pages at once.

        staging: the page's bytes in other memory, in the form that `PageReader.read` leaves them.
        """
        memory = self._slots[page.id]
        for piece, offset in self._reader.pieces(page, [PagePart(0, staging)]):
            memory[offset : offset + len(piece)].copy_(piece)
        return self._reader.views(memory, page, aligned=True)


def _groups(pages: Iterable[Page]) -> list[list[Page]]:
    in_order = sorted(pages, key=lambda page: page.id)
    return [list(group) for _, group in groupby(in_order, key=lambda page: (page.layer, page.expert))]


def _ids(group: Iterable[Page]) -> tuple[int, ...]:
    return tuple(page.id for page in group)
