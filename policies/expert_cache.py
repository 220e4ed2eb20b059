"""One cache of experts over all layers, and a CPU for what misses it: misses are fetched or run where they are.

A cache of all layers gives those with few popular experts less room. Plain LRU does badly there: layers take turns, so
that what was used longest ago is the layer whose turn is next. So recency counts in whole steps here, and of those that
were last used in the same step the one goes that the fewest tokens have chosen so far. vLLM's expert cache (pull
request 37190, "LFRU") weighs frequency against age in one number, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush, heapreplace

from moesched.errors import BadInput
from moesched.expert_latencies import ExpertLatencies
from moesched.plan import Plan
from moesched.step import Step

from .expert_placement import Expert, keep_dense, order_of, popularity_of
from .expert_pool import ExpertPool, all_fit, experts_that_fit, host_has_experts
from .kv_placement import attend, place_kv_that_fits


class Uses:
    """The experts of a cache by their last use.

    held: those that are there at first, used before all others.
    """

    def __init__(self, held: Iterable[Expert]) -> None:
        self._tokens: dict[Expert, int] = {}
        self._last = dict.fromkeys(held, -1)
        self._earliest = sorted(map(self._use, self._last))
        """A heap with a use of each: its last one or an earlier one."""

    def __len__(self) -> int:
        return len(self._last)

    def hits(self, layer: int, chosen: Mapping[int, int], step: int) -> list[int]:
        """Those of a layer's chosen experts that are in the cache, which are used in this step.

        chosen: by how many tokens. Steps never go back.
        """
        last, tokens, hits = self._last, self._tokens, []
        for number, more in chosen.items():
            expert = layer, number
            tokens[expert] = tokens.get(expert, 0) + more
            if expert in last:
                last[expert] = step
                hits.append(number)
        return hits

    def enter(self, expert: Expert, step: int) -> None:
        """An expert that was chosen is in the cache from this step on."""
        self._last[expert] = step
        heappush(self._earliest, self._use(expert))

    def give_up(self) -> Expert:
        """The expert whose turn it is to go: last used in the earliest step, of those chosen by the fewest tokens."""
        while True:
            earliest = self._earliest[0]
            expert = earliest[2]
            use = self._use(expert)
            if use == earliest:
                heappop(self._earliest)
                del self._last[expert]
                return expert
            heapreplace(self._earliest, use)

    def _use(self, expert: Expert) -> tuple[int, int, Expert]:
        return self._last[expert], self._tokens.get(expert, 0), expert


class ExpertCache:
    """Runs a layer's experts on the accelerator where they are in the cache; the others where the layer ends first.

    Those with the fewest tokens run on the host, and so many that host and accelerator end as early as they can, each
    expert's times being those of the machine's cost model. What is fetched enters the cache. Where the host has no
    weights to compute with, every expert that is missing is fetched.

    Settings:
        experts: how many the cache holds; by default as many as fit.
        popularity: a CSV file of how often each expert was chosen (layer, expert, count), for what is there at first.
        buffers: for how many more there is room: those that come while others go.
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

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attend(step, i, j)
            routing = [step.route(i, j) for j in step.micro_batches]
            self._run_experts(step, i, [await handle for handle in routing])
            for j in step.micro_batches:
                step.combine(i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    def _run_experts(self, step: Step, i: int, routed: Sequence[Mapping[int, int]]) -> None:
        chosen: dict[int, int] = {}
        for counts in routed:
            for expert, tokens in counts.items():
                chosen[expert] = chosen.get(expert, 0) + tokens
        hits = sorted(self.cache.hits(i, chosen, step.index))
        misses = sorted(sorted(chosen.keys() - hits), key=chosen.__getitem__, reverse=True)
        count = self._fetches(hits, misses, routed)
        fetched, on_host = misses[:count], sorted(misses[count:])
        back = [j for j in step.micro_batches if not routed[j].keys().isdisjoint(on_host)]
        for j in back:
            step.offload_routed(i, j)
        for expert in on_host:
            for j in back:
                if expert in routed[j]:
                    step.run_expert(i, expert, j, at="host")
        for expert in hits:
            self._run_here(step, i, expert, routed)
        for expert in fetched:
            self.pool.fetch(step, (i, expert))
            self._run_here(step, i, expert, routed)
            self.cache.enter((i, expert), step.index)
            if len(self.cache) > self.room:
                self.pool.evict(step, self.cache.give_up())
        for j in back:
            step.load_routed(i, j)

    def _run_here(self, step: Step, i: int, expert: int, routed: Sequence[Mapping[int, int]]) -> None:
        for j in step.micro_batches:
            if expert in routed[j]:
                step.run_expert(i, expert, j)

    def _fetches(
        self, hits: Iterable[int], misses: Sequence[int], routed: Sequence[Mapping[int, int]]
    ) -> int:
        """How many of the missing experts, those with the most tokens first, are fetched; the others run on the host.

        A fetch takes as long for many tokens as for few, so that those with the most tokens are fetched.
        """
        if not self.has_host:
            return len(misses)
        at_host, at_accelerator = self.latencies.at_host, self.latencies.at_accelerator
        here = sum([at_accelerator(each[expert]) for each in routed for expert in hits if expert in each])
        host = sum([at_host(each[expert]) for each in routed for expert in misses if expert in each])
        best, end, link = 0, max(here, host), 0.0
        for count, expert in enumerate(misses, 1):
            tokens = [each[expert] for each in routed if expert in each]
            link += self.latencies.transfer
            here = max(here, link) + sum(map(at_accelerator, tokens))
            if here > end:
                break
            host -= sum(map(at_host, tokens))
            if host <= end:
                best, end = count, max(here, host)
        return best
