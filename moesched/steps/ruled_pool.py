"""A pool in which an eviction rule chooses the page to evict, to make room for another one."""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize

from moesched.engine import Engine
from moesched.models.layout import Page
from moesched.steps.eviction import Eviction, RuledPages
from moesched.steps.memory import Memory, Pool, Replacement, Slot


class RuledPool(Pool):
    """A pool of page slots, in which an `Eviction` chooses the page to be replaced.

    Args:
        rule: an `Eviction` object that no other pool has, or a class of such objects. The other arguments are as in
            `Pool`.

    Raises:
        PolicyError: `rule` is no eviction rule, or orders the pages of another pool.
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        slots: int,
        slot_bytes: int,
        rule: Replacement | Eviction | type[Eviction],
        page_bytes: int = maxsize,
        line: str = "",
    ) -> None:
        self._ruled = RuledPages(rule, f"pool {name}", slots)
        self._incoming: Sequence[Page] = ()
        super().__init__(name, memory, slots, slot_bytes, rule, page_bytes, line)

    def assign_all(self, pages: Sequence[Page], engine: Engine, arrival: int, step: int) -> tuple[Slot, ...]:
        self._incoming = pages
        return super().assign_all(pages, engine, arrival, step)

    def touch(self, slot: Slot, step: int, tokens: int) -> None:
        page = slot.page
        if page is None:
            return
        if page.id in self._ruled.held:
            self._ruled.use(page, step, tokens)
        else:  # it comes, after all others of its fetch have their slots, so that a fetch does not replace its own
            self._ruled.enter(page, step)

    def _replaced(self, page: Page, engine: Engine) -> Slot:
        if not self._ruled.held:
            return super()._replaced(page, engine)
        slot = self._held[self._ruled.next_to_go(self._incoming).id]
        self._forget(slot, engine)
        return slot

    def _forget(self, slot: Slot, engine: Engine) -> None:
        if slot.page is not None:
            self._ruled.held.pop(slot.page.id, None)
        super()._forget(slot, engine)
