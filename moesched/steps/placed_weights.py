"""Placement of a plan's pages: resident pages, and the pools through which the others stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from moesched.models.layout import Page
from moesched.steps.memory import Fixed, Home, Memory, Pool

LOAD_BUFFERS = 4
"""Most pages that are loaded concurrently before the first step; fewer where memory is short."""


class PlacedWeights:
    """Pools and resident pages, in the order of their declaration.

    Attributes:
        resident: pages that stay; each is loaded before the first step.
        pools: slots that pages pass through.
        filled: pages that are brought to a pool before the first step.
        home: pages that the host computes with in the memory that weights come from; None where it runs no experts.
        load_buffers: number of pages that are loaded concurrently.
    """

    def __init__(self) -> None:
        self.resident: list[Fixed] = []
        self.pools: list[Pool] = []
        self.filled: list[tuple[Pool, tuple[Page, ...]]] = []
        self.home: Home | None = None
        self.load_buffers = LOAD_BUFFERS
        self._in_order: list[Pool] = []

    def add_pool(self, pool: Pool, filled: Sequence[Page]) -> None:
        """Add a pool, and the pages that are in it before the first step."""
        self.pools.append(pool)
        self._in_order.append(pool)
        if filled:
            self.filled.append((pool, tuple(filled)))

    def keep(self, memory: Memory, pages: Sequence[Page], sizes: Sequence[int]) -> Fixed:
        """Have pages stay in a memory."""
        resident = self.hold(memory, pages, sizes)
        self._in_order.append(resident)
        return resident

    def hold(self, memory: Memory, pages: Sequence[Page], sizes: Sequence[int]) -> Fixed:
        """Have pages stay in a memory where their bytes are reserved already."""
        resident = Fixed(f"kept {len(self.resident)}", memory, pages, sizes)
        self.resident.append(resident)
        return resident

    def claims(self, memory: Memory, free: int) -> Iterator[tuple[str, int]]:
        """Name and bytes of each claim on a memory that has `free` bytes left."""
        for pool in self._in_order:
            if pool.memory is memory:
                for what, nbytes in pool.claims(free):
                    yield what, nbytes
                    free -= nbytes

    def reserve(self) -> None:
        """Reserve the bytes of all pools and resident pages.

        Raises:
            OverBudget: one does not fit.
        """
        for pool in self._in_order:
            pool.reserve()

    def leave_at_home(self, memory: Memory, pages: Sequence[Page], both: Collection[int]) -> None:
        """Have the host compute with the pages that stay nowhere else, and with those whose ids are in `both`."""
        elsewhere = {page.id for resident in self.resident for page in resident.pages()} - set(both)
        self.home = Home(memory, (page for page in pages if page.id not in elsewhere))

    def count_load_buffers(self, memory: Memory, global_bytes: int) -> None:
        """Choose `load_buffers` for a memory with resident pages, unless a pool there has slots to load through.

        global_bytes: bytes of the weights outside the layers, which are loaded first.

        Raises:
            OverBudget: there is no memory for one buffer.
        """
        sizes = [slot.nbytes for each in self.resident if each.memory is memory for slot in each.slots]
        if not sizes or any(pool.memory is memory and len(pool.slots) > 1 for pool in self.pools):
            return
        loaded, largest = sum(sizes) + global_bytes, max(sizes)
        self.load_buffers = min(LOAD_BUFFERS, max(1, (memory.capacity - loaded) // largest))
        memory.require("weights while they are loaded", loaded + self.load_buffers * largest)
