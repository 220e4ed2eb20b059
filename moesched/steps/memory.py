"""Memories with budgets, and pools of page slots.

A plan reserves bytes for the whole run. Slots are used again in program order: once a policy has evicted a
page, it may bring another page to that slot, although tasks that read the first page may not have run yet. The transfer
of the new page waits for those tasks, so that pages stay whole, whatever overlaps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from sys import maxsize
from typing import TYPE_CHECKING, Literal, Protocol

from moesched.engine import Engine
from moesched.errors import NotResident, OverBudget, PolicyError
from moesched.models.layout import Page
from moesched.steps.claims import Claim, Parts, claim_of_slots
from moesched.steps.model_pages import describe
from moesched.steps.pool_counts import FETCHED, LOADED, PoolCounts
from moesched.steps.read_only import ReadOnly
from moesched.tasks import DONE, RUNNING, Block, PageTransfer

if TYPE_CHECKING:
    from moesched.steps.eviction import Eviction

Replacement = Literal["ring", "lru", "none"]


class Memory(ReadOnly):
    """One memory of the machine, with a budget in bytes and a table of the slots that hold pages.

    Args:
        name: the memory's name in the machine's profile.
        capacity: the budget in bytes.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._used = 0
        self._peak = 0
        self._table: dict[int, Slot] = {}
        self._seal()

    def __contains__(self, page: Page) -> bool:
        return page.id in self._table

    @property
    def used(self) -> int:
        """Reserved bytes of the budget."""
        return self._used

    @property
    def peak(self) -> int:
        """Largest number of bytes of the budget that were in use at once so far."""
        return self._peak

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are not reserved."""
        return self.capacity - self._used

    def reserve(self, what: str, nbytes: int, parts: Parts | None = None, remedy: str = "") -> None:
        """Take bytes for the whole run.

        Args:
            what: the user of the bytes, the subject of the message "... needs N bytes".
            nbytes: the bytes to take.
            parts: the equal parts that the bytes consist of; None if they have none.
            remedy: advice for users, added at the end of that message; empty for none.

        Raises:
            OverBudget: fewer bytes are free.
        """
        self.require_free(what, nbytes, self.free_bytes, parts, remedy)
        self._used += nbytes
        self._peak = max(self._peak, self._used)

    def require(self, what: str, nbytes: int) -> None:
        """Check that bytes in use before the first step, such as those of loading, fit the budget.

        The bytes count for the peak, and are not reserved.

        Args:
            what: the user of the bytes, the subject of the message "... need N bytes".
            nbytes: all bytes in use at that time, reserved or not.

        Raises:
            OverBudget: the bytes are more than the budget.
        """
        if nbytes > self.capacity:
            raise OverBudget(
                f"{what} need {nbytes:,} bytes of {self.name}, whose budget is {self.capacity:,}: "
                f"{nbytes - self.capacity:,} bytes too few"
            )
        self._peak = max(self._peak, nbytes)

    def require_free(
        self, what: str, nbytes: int, free: int, parts: Parts | None = None, remedy: str = ""
    ) -> None:
        """Check that `nbytes` bytes fit in `free` bytes.

        Args:
            what: the user of the bytes, the subject of the message "... needs N bytes".
            parts: the equal parts that the bytes consist of; None if they have none.
            remedy: advice for users, added at the end of that message; empty for none.

        Raises:
            OverBudget: they do not fit; the message says how many parts would.
        """
        if nbytes > free:
            fit = "" if parts is None else f", {parts.that_fit(nbytes, free)}"
            raise OverBudget(
                f"{what} needs {nbytes:,} bytes of {self.name}, which has {max(free, 0):,} free of its "
                f"budget of {self.capacity:,}: {nbytes - free:,} bytes too few{fit}{remedy}"
            )


class OpenView(Protocol):
    """A `View`: the slots of several pages as a kernel reads them. A slot that gets another page closes its views."""

    def close(self, engine: Engine) -> None:
        """End the view, and have the next writers of its slots wait for the tasks that read through it."""


class Slot(Block):
    """Space for one page.

    Attributes:
        pool: the pool that the slot belongs to.
        index: the slot's number in the pool.
        fixed: whether the slot holds the same page for the whole run.
        page: the page that it holds; None while it is empty.
        read: number of the last step that read the page. If no step has read it, a negative number for its arrival:
            `LOADED` before the first step, `FETCHED` on demand, or `SPECULATED` by a speculative fetch.
        views: the open views that show the page; a view is the set of slots that one kernel reads.
    """

    __slots__ = ("fixed", "index", "page", "pool", "read", "views")

    def __init__(self, pool: Pool, index: int, nbytes: int, *, fixed: bool = False) -> None:
        super().__init__(f"{pool.name}[{index}]", nbytes, pool.memory.name)
        self.pool = pool
        self.index = index
        self.fixed = fixed
        self.page: Page | None = None
        self.read = LOADED
        self.views: list[OpenView] = []

    def forget(self) -> None:
        """Drop the slot's references to the tasks and views that used the slot."""
        self.writer = None
        self.readers.clear()
        self.views.clear()


class Pool(ReadOnly):
    """Page slots of one size in one memory, allocated once for the whole run.

    Empty slots are filled first. When there are none, a `ring` replaces the oldest page, `lru` the least recently used
    one, and `none` raises OverBudget. In a `RuledPool`, an `Eviction` chooses the page. Making a pool takes no bytes of
    the memory's budget: `reserve` does.

    Args:
        name: the pool's name in messages and reports.
        slots: number of slots.
        slot_bytes: bytes of a slot in the memory.
        replacement: "ring", "lru", "none", or for a `RuledPool` an eviction rule.

    Attributes:
        page_bytes: bytes of the largest page that the pool was declared for, by `Page.nbytes`; a slot may be larger.
        line: the policy's line that declared the pool, as file:line; empty where that is not known.
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        slots: int,
        slot_bytes: int,
        replacement: Replacement | Eviction | type[Eviction] = "ring",
        page_bytes: int = maxsize,
        line: str = "",
    ) -> None:
        self.name = name
        self.page_bytes = page_bytes
        self.line = line
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.replacement = replacement
        self._told_of_uses = replacement == "lru" or not isinstance(replacement, str)
        self._counts = PoolCounts()
        self._slots = [Slot(self, index, slot_bytes) for index in range(slots)]
        self._empty = deque(self._slots)
        self._held: OrderedDict[int, Slot] = OrderedDict()
        self._seal()

    def __contains__(self, page: Page) -> bool:
        return page.id in self._held

    @property
    def slots(self) -> range:
        """The numbers of the pool's slots, from 0."""
        return range(len(self._slots))

    @property
    def nbytes(self) -> int:
        """Bytes of all the pool's slots."""
        return len(self._slots) * self.slot_bytes

    def claims(self, free: int) -> Iterable[Claim]:
        """Return one `Claim` for the bytes of all slots; `free`, the bytes left in the pool's memory, has no effect."""
        return [claim_of_slots(self.name, len(self._slots), self.slot_bytes)]

    def reserve(self) -> None:
        """Reserve the bytes of all slots in the pool's memory, for the whole run.

        Raises:
            OverBudget: fewer bytes are free.
        """
        try:
            for claim in self.claims(self.memory.free_bytes):
                self.memory.reserve(*claim)
        except OverBudget as error:
            error.line = self.line
            raise

    @property
    def empty_slots(self) -> int:
        """Number of slots that hold no page."""
        return len(self._empty)

    def pages(self) -> list[Page]:
        """Return the pages that the pool holds, the next one to be replaced first."""
        return [slot.page for slot in self._held.values() if slot.page is not None]

    def assign_all(self, pages: Sequence[Page], engine: Engine, arrival: int, step: int) -> tuple[Slot, ...]:
        """Assign a slot to each of these pages; if that raises an error, to none of them.

        The pages that the slots held count as evicted from now on, though earlier tasks may still read them.

        Args:
            pages: pages that are not in the memory.
            engine: makes the next task that writes to a slot wait for the readers of the slot's old page.
            arrival: the way in which the next submitted task brings the pages: `LOADED`, `FETCHED` or `SPECULATED`.
            step: the step that brings them; -1 before the first one.

        Returns:
            the slots, in the order of the pages.

        Raises:
            PolicyError: a page is in the memory already, or the pool's replacement rule failed.
            OverBudget: the pool has no room for a page.
        """
        table, held, empty = self.memory._table, self._held, self._empty
        slots: list[Slot] = []
        try:
            for page in pages:
                number = page.id
                if number in table:
                    _vacate_lost(page, table[number], slots, engine)
                slot = empty.popleft() if empty else self._replaced(page, engine)
                slot.page = page
                slot.read = arrival
                table[number] = held[number] = slot
                slots.append(slot)
            if self._told_of_uses:
                for slot in slots:
                    self.touch(slot, step, 0)
        except PolicyError:
            for slot in slots:
                slot.read = LOADED
                self.vacate(slot, engine)
            raise
        if arrival != LOADED:
            self._counts.fetched += len(slots)
        return tuple(slots)

    def vacate(self, slot: Slot, engine: Engine) -> None:
        """Empty a slot; the next task that writes to the slot waits for all tasks that read its page."""
        self._forget(slot, engine)
        slot.page = None
        self._empty.append(slot)

    def cancel(self, pages: Sequence[Page], engine: Engine) -> bool:
        """Cancel the transfer of these pages and empty their slots, unless the transfer has started.

        Returns:
            whether the transfer was cancelled; if not, nothing has changed.

        Raises:
            NotResident: a page is not in the pool.
            PolicyError: the pages are not exactly those of one transfer, or a submitted task uses one of them.
        """
        slots = held_slots("cancel", pages, self)
        transfer = slots[0].writer if slots else None
        if not isinstance(transfer, PageTransfer) or {*transfer.slots} != {*slots}:
            raise PolicyError(
                "cancel: these pages are not what one fetch brings: name all of one fetch together"
            )
        used = next((slot for slot in slots if slot.readers or slot.views), None)
        if transfer.state < RUNNING and used is not None and used.page is not None:
            raise PolicyError(
                f"cancel: page {describe(used.page)} is used by a task that was submitted: evict it"
            )
        if used is not None or not engine.cancel(transfer):
            return False
        self._counts.cancelled += len(slots)
        for slot in slots:
            self.vacate(slot, engine)
        return True

    def touch(self, slot: Slot, step: int, tokens: int) -> None:
        """Note a use of a slot's page in the step `step`, for the replacement rule.

        tokens: rows of the task that reads the page; 0 when the page comes or is copied.
        """
        if self._told_of_uses and slot.page is not None:
            self._held.move_to_end(slot.page.id)

    def _replaced(self, page: Page, engine: Engine) -> Slot:
        """Free the slot of the page that the pool's rule replaces next, and return the slot.

        Args:
            page: the page that gets the slot, for messages.
            engine: the engine of the run.

        Raises:
            OverBudget: the pool replaces no pages by itself, or holds none.
        """
        if self.replacement == "none" or not self._held:
            raise OverBudget(
                f"pool {self.name} in {self.memory.name} is full ({len(self.slots)} slots) and replaces nothing by "
                f"itself: evict a page before moving {describe(page)} there"
            )
        slot = next(iter(self._held.values()))
        self._forget(slot, engine)
        return slot

    def _forget(self, slot: Slot, engine: Engine) -> None:
        """Remove a slot's page from the page table, and close the views that show it."""
        if slot.views:
            for view in list(slot.views):
                view.close(engine)
        if slot.read < LOADED:
            self._counts.wasted += 1
        assert slot.page is not None
        del self.memory._table[slot.page.id]
        del self._held[slot.page.id]


def note_use(slots: Iterable[Slot], step: int, tokens: int) -> bool:
    """Note that a task of the step `step` reads the pages in these slots.

    tokens: number of the task's rows.

    Returns:
        whether later reads in the same step have to be noted as well, since a pool's replacement rule counts every use.
    """
    every_use = False
    for slot in slots:
        read, pool = slot.read, slot.pool
        if read != step:
            slot.read = step
            if slot.readers:
                slot.forget_readers(step - 1)  # all tasks of the step before that have settled
            if read == FETCHED:
                pool._counts.misses += 1
            else:
                pool._counts.hits += 1
        if pool._told_of_uses:
            pool.touch(slot, step, tokens)
            every_use = True
    return every_use


def slots_of(pool: Pool) -> Sequence[Slot]:
    """Return the slots of a pool, by number."""
    return pool._slots


def counts_of(pool: Pool) -> PoolCounts:
    """Return the running counts of a pool, such as pages fetched, hits, misses, and pages evicted before any use."""
    return pool._counts


def held_slot(page: Page, pool: Pool) -> Slot | None:
    """Return the slot of a pool that holds a page; None if the pool does not hold the page."""
    return pool._held.get(page.id)


def held_slots(verb: str, pages: Sequence[Page], source: Pool) -> tuple[Slot, ...]:
    """Return the slots of a pool that hold these pages, in their order.

    Raises:
        NotResident: the pool does not hold one of them; the message begins with the verb.
    """
    table = source._held
    held = []
    for page in pages:
        slot = table.get(page.id)
        if slot is None:
            raise NotResident(
                f"{verb}: page {describe(page)} is not in pool {source.name}: bring it there first"
            )
        held.append(slot)
    return tuple(held)


def _vacate_lost(page: Page, held: Slot, taken: Sequence[Slot], engine: Engine) -> None:
    """Check that a page's transfer failed or was cancelled, and empty its slot, so that it can be fetched again.

    Args:
        held: the page's slot.
        taken: slots that pages of the same call were already assigned to.

    Raises:
        PolicyError: the page is in the slot, on its way there, or named twice in the call.
    """
    if lost(held) is None or held in taken:
        raise PolicyError(
            f"page {describe(page)} is already in {held.memory} ({held.name}): fetch it once, or evict it first"
        )
    held.pool.vacate(held, engine)


def lost(slot: Slot) -> BaseException | None:
    """Return the error of the transfer that should have filled a slot; None unless it failed or was cancelled."""
    return slot.writer.cause if slot.writer is not None and slot.writer.state > DONE else None
