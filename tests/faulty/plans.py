"""Plans: one mistake in each policy. `#!` marks the line that must be named, and begins what must be said of it."""
from __future__ import annotations

from sound import Streams

COPY = {"weights": []}


class NamesMemoriesAsTheMachineDoes(Streams):
    """A machine's own names of memories are no mistake."""

    def plan(self, plan):
        plan.place_kv("gpu")
        self.pool = plan.pool("gpu", "layers", 2 * len(plan.layout.layer(0)), plan.layout.pages)


class UnknownMemory(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("vram", "more", 2, plan.layout.pages)  #! PolicyError: pool: 'vram' is no memory for that on


class UnknownMemoryToKeepIn(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.keep(plan.layout.dense(0), "vram")  #! PolicyError: keep: 'vram' is no memory


class UnknownMemoryForKV(Streams):
    def plan(self, plan):
        plan.place_kv("vram")  #! PolicyError: place_kv: 'vram' is no memory for that on


class UnknownReplacement(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("accelerator", "more", 2, plan.layout.pages, "LRU")  #! PolicyError: pool: replacement is 'LRU'


class UnknownDiscipline(Streams):
    def plan(self, plan):
        plan.discipline = "fifo"  #! PolicyError: discipline is 'fifo': assign 'in_order' or 'ready_first'


class HalfASlot(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("accelerator", "more", 2.5, plan.layout.pages)  #! PolicyError: pool: more has 2.5 slots


class FilledBeyondItsSlots(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        pages = plan.layout.layer(0)
        self.pool = plan.pool("accelerator", "layers", len(pages) - 1, pages, filled=pages)  #! PolicyError: pool: layers


class KeepsNumbers(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.keep([0, 1])  #! PolicyError: keep: 0 is no page


class KeepsOnePage(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.keep(plan.layout.pages[0])  #! PolicyError: keep: give a list of pages


class KeepsTwice(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        plan.keep(plan.layout.pages)
        plan.keep(plan.layout.dense(1))  #! PolicyError: keep: page L1 dense #0 stays in


class KeepsALayerThatIsNotThere(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.keep(plan.layout.layer(99))  #! PolicyError: layout.layer: there is no L99: layers go from 0 to


class TwoPoolsOfOneName(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("accelerator", "layers", 2, plan.layout.pages)  #! PolicyError: pool: gpu has a pool layers already


class TooManySlots(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.pool("accelerator", "layers", 10**9, plan.layout.pages)  #! pool layers of 1,000,000,000 slots


class PlacesNoKV(Streams):
    def plan(self, plan):  #! PolicyError: the plan has no place for the KV cache
        self.pool = plan.pool("accelerator", "layers", 40, plan.layout.pages)


class PlacesKVTwice(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.place_kv("host")  #! PolicyError: place_kv: the KV cache of mb0 is the accelerator's already: place each once


class PlacesKVOfAMicroBatchThatIsNotThere(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator", [0, 7])  #! PolicyError: place_kv: there is no mb7: micro-batches go from 0 to


class PlansAsynchronously(Streams):
    async def plan(self, plan):  #! PolicyError: plan of PlansAsynchronously is `async def`
        super().plan(plan)


class PlansWithoutThePlan(Streams):
    def plan(self):  #! TypeError: PlansWithoutThePlan.plan() takes 1 positional argument but 2 were given
        pass


class CallsAVerbInThePlan(Streams):
    def plan(self, plan):
        plan.embed(0)  #! AttributeError: 'Plan' object has no attribute 'embed'


class StumblesInThePlan(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.hot = COPY["experts"]  #! KeyError: 'experts'


class ChangesThePlan(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.layers = range(1)  #! PolicyError: layers of a Plan cannot be changed


class SplitsNodes(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.place_experts([[0, 1], [2, 3]])  #! PolicyError: place_experts: the placement is for 2 nodes, but there are 1
