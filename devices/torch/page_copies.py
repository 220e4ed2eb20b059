"""Copies of pages of weights from the host's memory to slots, which are on the host or on a GPU."""

from __future__ import annotations

from moesched.errors import OutOfMemory
from moesched.models.layout import Page
from moesched.system.logs import Log

from ..native.copy_team import CopyTeam
from ..products.linear import Tensor
from ..shared.page_reader import PageReader
from .compute import Compute
from .held_pages import HeldPage
from .staging_ring import StagingRing

_log = Log(__name__)


class PageCopies:
    """Copies pages of weights from the host's memory to slots, which are on the host or on the accelerator.

    Attributes:
        ring: page-locked buffers for copies from ordinary memory to a GPU; None before `make_ring`, or if CUDA locks no
            memory.
    """

    def __init__(self, reader: PageReader, compute: Compute) -> None:
        self.ring: StagingRing | None = None
        self._reader = reader
        self._compute = compute
        self._team: CopyTeam | None = None

    @property
    def team(self) -> CopyTeam:
        """The threads that copy within the host's memory."""
        if self._team is None:
            self._team = CopyTeam(self._compute.core_plan.copies or self._compute.cores)
        return self._team

    def make_ring(self) -> None:
        """Make the ring of staging buffers, if CUDA locks memory for it; a second call does nothing."""
        if self.ring is None:
            try:
                self.ring = StagingRing(self._reader.slot_bytes, self.team, self._compute.accelerator)
            except OutOfMemory as error:
                _log.warning("copies of weights to the GPU are slow", reason=str(error))

    def to_accelerator(self, page: Page, held: HeldPage, slot: Tensor) -> None:
        """Copy a page of weights to a slot on the accelerator, on the current stream, in the layout that kernels read.

        Args:
            held: the page in the host's memory.
            slot: the slot's bytes, uint8.
        """
        pieces = self._reader.pieces(page, held.parts)
        if self.ring is not None and not held.locked:
            self.ring.copy(pieces, slot)
            return
        for piece, offset in pieces:
            slot[offset : offset + len(piece)].copy_(piece, non_blocking=True)

    def to_host(self, held: HeldPage, slot: Tensor) -> None:
        """Copy a page of weights to a slot of the host's memory.

        Args:
            held: the page in the host's memory.
            slot: the slot's bytes, uint8.
        """
        self.team.copy([(slot[part.at : part.at + len(part.memory)], part.memory) for part in held.parts])

    def close(self) -> None:
        """Free the ring, and end the threads."""
        self.ring = None
        if self._team is not None:
            self._team.close()
            self._team = None
