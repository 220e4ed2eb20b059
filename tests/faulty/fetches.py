"""Fetches and evictions of pages: one mistake in each policy. `#!` marks the line that must be named, and begins what must be said of it."""
from __future__ import annotations

from sound import Streams


class BringsNothing(Streams):
    def bring(self, step, i):
        pass

    async def layer(self, step, i, j):
        step.embed(j)
        step.pre_attention(i, j)  #! NotResident: page L0 dense #0 is not in gpu


class BringsALayerTwice(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)
        step.fetch(step.pages(i), self.pool)  #! PolicyError: page L0 dense #0 is already in gpu


class BringsNumbers(Streams):
    def bring(self, step, i):
        step.fetch([i], self.pool)  #! PolicyError: fetch: 0 is no page


class BringsMoreThanFits(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.pool = plan.pool("accelerator", "small", 2, plan.layout.pages)

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)  #! OverBudget: fetch: 5 pages do not fit pool small of 2 slots: move fewer at once


class BringsOnePage(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i)[0], self.pool)  #! PolicyError: fetch: give a list of pages


class BringsNone(Streams):
    def bring(self, step, i):
        step.fetch(None, self.pool)  #! PolicyError: fetch: None is no list of pages


class BringsToNoPool(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i), "accelerator")  #! PolicyError: fetch: 'accelerator' is no pool


class BringsNoPages(Streams):
    def bring(self, step, i):
        step.fetch([], self.pool)  #! PolicyError: fetch: no pages to move into pool layers


class BringsFromAPoolThatHasNothing(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.empty = plan.pool("host", "staging", 4, plan.layout.pages)

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool, source=self.empty)  #! NotResident: fetch: page L0 dense #0 is not in pool


class OverfillsItsPool(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.pool("accelerator", "layers", 1, plan.layout.pages)

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)  #! OverBudget: fetch:


class FillsAPoolThatReplacesNothing(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.pool("accelerator", "layers", len(plan.layout.layer(0)), plan.layout.pages, "none")

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)  #! OverBudget: pool layers in


class BringsExpertsToSlotsOfDensePages(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.small = plan.pool("accelerator", "small", 8, [min(plan.layout.pages, key=lambda page: page.nbytes)])

    def bring(self, step, i):
        step.fetch([max(step.pages(i), key=lambda page: page.nbytes)], self.small)  #! PolicyError: fetch: page L0


class AwaitsWhatItCancelled(Streams):
    async def decode(self, step):
        first, second, *_ = step.pages(0)
        step.fetch([first], self.pool)
        coming = step.fetch([second], self.pool)
        step.cancel([second], self.pool)
        await coming  #! TaskCancelled: fetch L0


class EvictsWhatIsNotThere(Streams):
    def bring(self, step, i):
        step.evict(step.pages(i), self.pool)  #! NotResident: evict: page L0 dense #0 is not in pool layers: evict it once, while it is there


class EvictsWhatStays(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.keep(plan.layout.pages)

    def bring(self, step, i):
        step.evict(step.pages(i), self.pool)  #! PolicyError: evict: page L0 dense #0


class CancelsHalfAFetch(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)
        step.cancel(step.pages(i)[:1], self.pool)  #! PolicyError: cancel: these pages are not what one fetch brings
