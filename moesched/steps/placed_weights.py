"""Placement of a plan's pages: the pages that stay in a memory, and the pools of slots for those that are streamed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from moesched.models.layout import Page
from moesched.steps.claims import Claim
from moesched.steps.fixed_pages import FixedPages, HomePages
from moesched.steps.memory import Memory, Pool, slots_of
from moesched.steps.read_only import ReadOnly

LOAD_BUFFERS = 4
"""Largest number of pages that are loaded concurrently before the first step; fewer where memory is short."""


class PlacedWeights(ReadOnly):
    """The pools and the resident pages of a plan, in the order of their declaration."""

    def __init__(self) -> None:
        self._resident: list[FixedPages] = []
        self._pools: list[Pool] = []
        self._filled: list[tuple[Pool, tuple[Page, ...]]] = []
        self._home: HomePages | None = None
        self._load_buffers = LOAD_BUFFERS
        self._in_order: list[Pool] = []
        self._seal()

    @property
    def resident(self) -> tuple[FixedPages, ...]:
        """The pages that stay in a memory for the whole run."""
        return tuple(self._resident)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of slots that streamed pages pass through."""
        return tuple(self._pools)

    @property
    def filled(self) -> tuple[tuple[Pool, tuple[Page, ...]], ...]:
        """Pairs (pool, pages that are loaded into the pool before the first step)."""
        return tuple(self._filled)

    @property
    def home(self) -> HomePages | None:
        """Pages that the host reads where weights are stored, to run experts; None if it runs no experts from there."""
        return self._home

    @property
    def load_buffers(self) -> int:
        """Number of buffers, of one page each, through which resident pages are loaded before the first step."""
        return self._load_buffers

    def add_pool(self, pool: Pool, filled: Sequence[Page]) -> None:
        """Add a pool; `filled` are the pages that are loaded into the pool before the first step."""
        self._pools.append(pool)
        self._in_order.append(pool)
        if filled:
            self._filled.append((pool, tuple(filled)))

    def keep(self, memory: Memory, pages: Sequence[Page], sizes: Sequence[int]) -> FixedPages:
        """Add pages that stay in a memory for the whole run; `reserve` takes their bytes later.

        sizes: bytes of memory that each page takes on the device.
        """
        resident = self.hold(memory, pages, sizes)
        self._in_order.append(resident)
        return resident

    def hold(self, memory: Memory, pages: Sequence[Page], sizes: Sequence[int]) -> FixedPages:
        """Add pages that stay in a memory for the whole run; their bytes are reserved already.

        sizes: bytes of memory that each page takes on the device.
        """
        resident = FixedPages(f"kept {len(self._resident)}", memory, pages, sizes)
        self._resident.append(resident)
        return resident

    def claims(self, memory: Memory, free: int) -> Iterator[Claim]:
        """Yield what each pool and each set of resident pages needs of a memory that has `free` bytes left."""
        for pool in self._in_order:
            if pool.memory is memory:
                for claim in pool.claims(free):
                    yield claim
                    free -= claim.nbytes

    def reserve(self) -> None:
        """Reserve the bytes of all pools and resident pages.

        Raises:
            OverBudget: a pool or page does not fit.
        """
        for pool in self._in_order:
            pool.reserve()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pools and resident pages that `reserve` reserves, in all memories."""
        return sum(pool.nbytes for pool in self._in_order)

    def leave_at_home(self, memory: Memory, pages: Sequence[Page], both: Collection[int]) -> None:
        """Let the host compute, from the memory where weights are stored, with pages that stay in no other memory.

        Args:
            memory: the memory where weights are stored.
            pages: the pages to choose from.
            both: ids of pages that the host computes with even if they stay in another memory, too.
        """
        elsewhere = {page.id for resident in self._resident for page in resident.pages()} - set(both)
        self._home = HomePages(memory, (page for page in pages if page.id not in elsewhere))

    def count_load_buffers(self, memory: Memory, global_bytes: int) -> None:
        """Reduce `load_buffers` to the number that fits in a memory beside its resident pages, but to no less than 1.

        Args:
            memory: the memory that the pages are loaded into. If it has no resident pages, or has a pool of two or more
                slots, nothing changes.
            global_bytes: bytes of the weights outside the layers, which are loaded first.

        Raises:
            OverBudget: the memory has no room for one buffer.
        """
        sizes = [slot.nbytes for each in self._resident if each.memory is memory for slot in slots_of(each)]
        if not sizes or any(pool.memory is memory and len(pool.slots) > 1 for pool in self._pools):
            return
        loaded, largest = sum(sizes) + global_bytes, max(sizes)
        self._load_buffers = min(LOAD_BUFFERS, max(1, (memory.capacity - loaded) // largest))
        memory.require("weights while they are loaded", loaded + self._load_buffers * largest)
