"""One cache of experts for all layers; missing experts are fetched or run on the CPU.

A common cache gives less room to layers with few popular experts. Plain LRU does badly there: layers take turns, so the
least recently used experts belong to the layer whose turn is next. Here recency counts in whole steps. Of the experts
last used in the same step, the one with the fewest tokens so far is evicted. vLLM's expert cache (pull request 37190,
"LFRU") weighs frequency against age in one number, for the same reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush, heapreplace

from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import (
    Expert,
    Routed,
    keep_dense,
    order_of,
    popularity_of,
    seconds_of,
    tokens_of,
    users_of,
)
from moesched.dispatch.expert_pool import ExpertPool, all_fit, experts_that_fit, host_has_experts
from moesched.dispatch.kv_placement import place_kv_that_fits
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.errors import BadInput
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class Uses:
    """The experts of a cache, ordered by their last use.

    held: experts in the cache at the start, used before all others.
    """

    def __init__(self, held: Iterable[Expert]) -> None:
        self._tokens: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._last: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By layer, the experts in the cache, each with the step of its last use."""
        self._count = 0
        self._earliest: list[tuple[int, int, Expert]] = []
        """A heap with one use of each expert: its last one or an earlier one."""
        for expert in held:
            self.enter(expert, -1)

    def __len__(self) -> int:
        return self._count

    def hits(self, layer: int, chosen: Mapping[int, int], step: int) -> list[int]:
        """Record the use of a layer's chosen experts in this step; returns those that are in the cache.

        chosen: number of tokens by expert. Steps never go back.
        """
        last, tokens = self._last[layer], self._tokens[layer]
        for expert, more in chosen.items():
            tokens[expert] += more
        hits = sorted(chosen.keys() & last)
        for expert in hits:
            last[expert] = step
        return hits

    def enter(self, expert: Expert, step: int) -> None:
        """Add a chosen expert to the cache, last used in this step."""
        layer, number = expert
        self._last[layer][number] = step
        self._count += 1
        heappush(self._earliest, (step, self._tokens[layer][number], expert))

    def give_up(self) -> Expert:
        """Remove and return the expert last used in the earliest step; of several, the one with the fewest tokens."""
        while True:
            earliest = self._earliest[0]
            expert = earliest[2]
            layer, number = expert
            last = self._last[layer]
            use = last[number], self._tokens[layer][number], expert
            if use == earliest:
                heappop(self._earliest)
                del last[number]
                self._count -= 1
                return expert
            heapreplace(self._earliest, use)


class ExpertCache(LayerByLayer):
    """Cached experts run on the accelerator; the others are placed so that the layer ends first.

    Missing experts with the fewest tokens run on the host; their number minimises the layer's makespan, by the
    latencies of the machine's cost model. Fetched experts enter the cache. If the host does not have the weights, all
    missing experts are fetched.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        popularity: a CSV file of each expert's count (layer, expert, count), to choose the first experts in the cache.
        buffers: slots beside the cache, for experts that arrive before another is evicted.
    """

    def __init__(self, experts: int = -1, popularity: str = "", buffers: int = 2) -> None:
        if buffers < 1:
            raise BadInput(f"buffers is {buffers}: give 1 or more")
        self.most = None if experts < 0 else experts
        self.popularity = popularity
        self.buffers = buffers

    def plan(self, plan: Plan) -> None:
        place_kv_that_fits(plan, experts=self.buffers)
        keep_dense(plan)
        order = order_of("popular", popularity_of(plan, self.popularity))
        self.latencies = ExpertLatencies(plan)
        self.has_host = False
        if (self.most is None or self.most >= len(order)) and all_fit(plan):
            plan.keep([page for page in plan.layout.pages if page.expert >= 0])
            self.room = len(order)
        else:
            self.has_host = host_has_experts(plan)
            if self.has_host:
                plan.run_experts_on_host()
            fit = max(0, experts_that_fit(plan) - self.buffers)
            self.room = fit if self.most is None else min(self.most, len(order))
            self.pool = ExpertPool(plan, self.room + self.buffers, order[: self.room], on_host=self.has_host)
        self.cache = Uses(order[: self.room])

    def _run_experts(self, step: Step, i: int, routed: Routed) -> None:
        chosen, users = tokens_of(routed), users_of(routed)
        hits = self.cache.hits(i, chosen, step.index)
        missing = sorted(chosen.keys() - hits)
        missing.sort(key=chosen.__getitem__, reverse=True)
        count = self._fetches(hits, missing, routed)
        fetched, on_host = missing[:count], sorted(missing[count:])
        back = self._run_on_host(step, i, on_host, users)
        for expert in hits:
            self._run(step, i, expert, users[expert])
        for expert in fetched:
            page = i, expert
            self.pool.fetch(step, page)
            self._run(step, i, expert, users[expert])
            self.cache.enter(page, step.index)
            if len(self.cache) > self.room:
                self.pool.evict(step, self.cache.give_up())
        for j in back:
            step.load_routed(i, j)

    def _fetches(self, hits: Iterable[int], misses: Sequence[int], routed: Routed) -> int:
        """Number of missing experts to fetch, those with the most tokens first; the others run on the host.

        A fetch takes equally long for any number of tokens, so it pays most for the experts with the most.
        """
        if not self.has_host:
            return len(misses)
        at_host = seconds_of(self.latencies.at_host, routed, misses)
        at_accelerator = seconds_of(self.latencies.at_accelerator, routed, misses)
        here = sum(seconds_of(self.latencies.at_accelerator, routed, hits).values())
        host = sum(at_host.values())
        best, end, link, transfer = 0, max(here, host), 0.0, self.latencies.transfer
        for count, expert in enumerate(misses, 1):
            link += transfer
            here = max(here, link) + at_accelerator[expert]
            if here > end:
                break
            host -= at_host[expert]
            if host <= end:
                best, end = count, max(here, host)
        return best
