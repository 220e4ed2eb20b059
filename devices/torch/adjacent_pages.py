"""The accelerator's memory for pages that stay: those of an expert, or of a layer's dense part, lie together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch

from moesched.models.layout import EXTENT_ALIGNMENT, Page

from ..products.linear import NamedBlocks, Tensor
from ..shared.page_reader import PageReader, Part
from .compute import Compute


class AdjacentPages:
    """Memory for pages: those of an expert, or of a layer's dense part, are one after the other in one allocation.

    The parts of a resident matrix are then one block for `joined`.
    """

    def __init__(self, reader: PageReader, compute: Compute) -> None:
        self._reader = reader
        self._compute = compute
        self._slots: dict[int, Tensor] = {}
        """The bytes of each page, by its id."""
        self._together: set[tuple[int, ...]] = set()
        """The ids of the pages in each allocation."""

    def retain(self, pages: Iterable[Page]) -> set[int]:
        """Free each allocation unless exactly its pages are among these; returns the ids of the pages that are kept."""
        self._together &= {_ids(group) for group in _groups(pages)}
        staying = {page for group in self._together for page in group}
        self._slots = {page: slot for page, slot in self._slots.items() if page in staying}
        return staying

    def allocate(self, pages: Iterable[Page]) -> None:
        """Allocate memory for those of the pages that have none; the same pages were passed to `retain` before."""
        for group in _groups(pages):
            if _ids(group) not in self._together:
                self._together.add(_ids(group))
                sizes = [-(-page.nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT for page in group]
                memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self._compute.accelerator)
                self._slots |= zip(_ids(group), memory.split(sizes), strict=True)

    def memory(self, page: Page, elsewhere: Tensor | None) -> Tensor | None:
        """The memory of a page; `elsewhere` if none was allocated for the page."""
        return self._slots.get(page.id, elsewhere)

    def copied(self, page: Page, staging: Tensor) -> NamedBlocks:
        """Copy a page to its memory, and return its tensors there; threads may do so with different pages.

        staging: the page's bytes as they were read.
        """
        memory = self._slots[page.id]
        for piece, offset in self._reader.pieces(page, [Part(0, staging)]):
            memory[offset : offset + len(piece)].copy_(piece)
        return self._reader.views(memory, page, aligned=True)


def _groups(pages: Iterable[Page]) -> list[list[Page]]:
    in_order = sorted(pages, key=lambda page: page.id)
    return [list(group) for _, group in groupby(in_order, key=lambda page: (page.layer, page.expert))]


def _ids(group: Iterable[Page]) -> tuple[int, ...]:
    return tuple(page.id for page in group)
