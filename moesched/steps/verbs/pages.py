"""The verbs that move weights: fetch, copy_to_pinned, promote, cancel, evict."""

from __future__ import annotations

from collections.abc import Sequence
from sys import _getframe
from threading import get_ident

from moesched.errors import NotResident, OverBudget, PolicyError
from moesched.models.layout import Page
from moesched.steps.memory import Pool, held_slot, held_slots, note_use, slots_of
from moesched.steps.model_pages import describe, require_list, require_pages
from moesched.steps.pool_counts import FETCHED, SPECULATED
from moesched.steps.verbs.base import Verbs, too_many
from moesched.system.plain_text import shown
from moesched.tasks import DEMAND, IDLE, PREFETCH, PageTransfer, Task


class PageVerbs(Verbs):
    """The verbs that move pages into pools and drop them, and methods that return a layer's or an expert's pages."""

    def pages(self, layer: int) -> tuple[Page, ...]:
        """Return all pages of a layer."""
        self._require_layer("pages", layer)
        return self._state.plan.layout.layer(layer)

    def dense_pages(self, layer: int) -> tuple[Page, ...]:
        """Return the pages of a layer that every token needs: norms, attention's projections, the router."""
        self._require_layer("dense_pages", layer)
        return self._state.plan.layout.dense(layer)

    def expert_pages(self, layer: int, expert: int) -> tuple[Page, ...]:
        """Return the pages of one expert."""
        self._require_layer("expert_pages", layer)
        pages = self._state.plan.layout.expert(layer, expert)
        if not pages:
            raise self._no_expert("expert_pages", layer, expert)
        return pages

    def fetch(
        self,
        pages: Sequence[Page],
        pool: Pool,
        *,
        source: Pool | None = None,
        urgent: bool = False,
        speculative: bool = False,
    ) -> Task:
        """Move pages into slots of `pool` in one transfer, from `source` or from where the weights are stored.

        On its link, an urgent transfer goes before all that are not urgent, and a speculative one after all others.

        Raises:
            PolicyError: a page is in the pool's memory already, or there are no pages to move.
            NotResident: `source` does not hold a page.
        """
        arrival = SPECULATED if speculative else FETCHED
        priority_class = DEMAND if urgent else IDLE if speculative else PREFETCH
        return self._transfer("fetch", pages, pool, source, arrival, priority_class)

    def copy_to_pinned(self, pages: Sequence[Page], pool: Pool, *, source: Pool | None = None) -> Task:
        """Move pages into page-locked memory, the first hop to the accelerator.

        source: the pool that the pages are copied from; None for the memory where the weights are stored.
        """
        return self._transfer("copy_to_pinned", pages, pool, source, FETCHED, PREFETCH)

    def promote(self, pages: Sequence[Page], pool: Pool) -> None:
        """Make the transfers of these pages to `pool` urgent; a transfer that has started goes on as it is."""
        self._require_own("promote", pool)
        for slot in held_slots("promote", pages, pool):
            if slot.writer is not None:
                self._state.engine.promote(slot.writer, DEMAND)

    def cancel(self, pages: Sequence[Page], pool: Pool) -> bool:
        """Cancel the transfer of unused pages, if it has not started; it then moves no bytes.

        Returns:
            whether the transfer was cancelled. If not, nothing has changed; call `evict` instead.

        Raises:
            NotResident: a page is not in the pool.
            PolicyError: the pages are not exactly those of one fetch, or a submitted task uses one of them.
        """
        self._require_own("cancel", pool)
        return pool.cancel(pages, self._state.engine)

    def evict(self, pages: Sequence[Page], pool: Pool) -> None:
        """Drop pages; their slots are free for the next fetch."""
        self._require_own("evict", pool)
        for page in pages:
            slot = held_slot(page, pool)
            if slot is None:
                raise NotResident(
                    f"evict: page {describe(page)} is not in pool {pool.name}: evict it once, while it is there"
                )
            if slot.fixed:
                raise PolicyError(
                    f"evict: page {describe(page)} is kept for the whole run: keep fewer in the plan"
                )
            pool.vacate(slot, self._state.engine)

    def _require_own(self, verb: str, pool: Pool, source: Pool | None = None) -> None:
        """Check that the policy is running on this thread, and that the pools are of its own plan.

        Raises:
            PolicyError: it is not running, runs on another thread, or a pool is of another plan.
        """
        if self._gate.thread != get_ident():
            raise self._gate.refusal(verb)
        own = self._own_pools
        try:
            if pool in own and (source is None or source in own):
                return
        except TypeError:  # one is no pool
            pass
        self._add_own(verb, pool)
        if source is not None:
            self._add_own(verb, source)

    def _add_own(self, verb: str, pool: Pool) -> None:
        """Check that a pool is of this run's plan, and note it, so that it is not checked again; errors name `verb`.

        Raises:
            PolicyError: `pool` is of another plan, or is no pool.
        """
        try:
            if self._state.plan.memories.get(pool.memory.name) is not pool.memory:
                raise PolicyError(
                    f"{verb}: pool {pool.name} belongs to another run: use a pool that this run's plan made"
                )
            self._own_pools.add(pool)
        except (AttributeError, TypeError):
            raise PolicyError(f"{verb}: {shown(pool)} is no pool: give what plan.pool returned") from None

    def _transfer(
        self,
        verb: str,
        pages: Sequence[Page],
        pool: Pool,
        source: Pool | None,
        arrival: int,
        priority_class: int,
    ) -> Task:
        """Submit the task of a verb that moves pages into slots of a pool.

        Args:
            source: the pool that the pages are copied from; None for the memory where the weights are stored.
            arrival: `SPECULATED` for a speculative fetch, otherwise `FETCHED`; the pool's counts depend on it.
            priority_class: the transfer's priority class on its link; lower ones go first.
        """
        self._require_own(verb, pool, source)
        try:
            count = len(pages)
        except TypeError:  # a generator, or no list at all
            pages = require_list(verb, pages)
            count = len(pages)
        if not count:
            raise PolicyError(f"{verb}: no pages to move into pool {pool.name}: skip the call")
        state = self._state
        plan = state.plan
        nbytes = require_pages(verb, pages, plan.layout, pool.page_bytes)
        reads = () if source is None else held_slots(verb, pages, source)
        if count > 1 and count > len(slots_of(pool)):
            room = len(slots_of(pool))
            raise OverBudget(
                f"{verb}: {count} pages do not fit pool {pool.name} of {room} slots: move fewer at once, or declare "
                "more slots in the plan"
            )
        moved = tuple(pages)
        slots = pool.assign_all(moved, state.engine, arrival, self._number)
        if reads:
            note_use(reads, self._number, 0)
        origin = plan.machine.roles.weights if source is None else source.memory.name
        lane, work = state.works.move(origin, pool.memory.name, nbytes, count)
        first = moved[0]
        task = PageTransfer(
            lane, work, verb, first.layer, -1, first.expert, reads, self._number, self._generated
        )
        task.pages, task.slots = moved, slots
        policy = _getframe(2)  # a verb calls this, a policy calls the verb
        task.code = policy.f_code
        task.instruction = policy.f_lasti
        submit = self._submit
        submit(task, reads, slots, (), priority_class)
        if task.id >= self._last_task:
            raise too_many(verb, plan.task_limit)
        return task
