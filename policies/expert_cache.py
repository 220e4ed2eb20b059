"""One cache of experts over all layers, and a CPU for what misses it: misses are fetched or run where they are.

A cache of all layers gives those with few popular experts less room. Plain LRU does badly there: layers take turns, so
that what was used longest ago is the layer whose turn is next. So recency counts in whole steps here, and of those that
were last used in the same step the one goes that the fewest tokens have chosen so far. vLLM's expert cache (pull
request 37190, "LFRU") weighs frequency against age in one number, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from moesched.errors import BadInput
from moesched.expert_latencies import ExpertLatencies
from moesched.plan import Plan
from moesched.step import Step

from .expert_placement import Expert, keep_dense, order_of, popularity_of
from .expert_pool import ExpertPool, all_fit, experts_that_fit, host_has_experts
from .kv_placement import attend, place_kv_that_fits

MOST_STALE = 4
"""How many times as many uses as experts are remembered before those that are out of date are dropped."""


class Uses:
    """The experts of a cache by their last use.

    held: those that are there at first, used before all others.
    """

    def __init__(self, held: Iterable[Expert]) -> None:
        self._tokens: dict[Expert, int] = {}
        self._last = {expert: (-1, 0, expert) for expert in held}
        self._uses = sorted(self._last.values())

    def __len__(self) -> int:
        return len(self._last)

    def count(self, expert: Expert, tokens: int) -> bool:
        """So many tokens more have chosen an expert; says whether it is in the cache."""
        self._tokens[expert] = self._tokens.get(expert, 0) + tokens
        return expert in self._last

    def use(self, expert: Expert, step: int) -> None:
        """An expert is used in a step; it is in the cache from here on."""
        use = self._last[expert] = (step, self._tokens.get(expert, 0), expert)
        heappush(self._uses, use)
        if len(self._uses) > MOST_STALE * len(self._last):
            self._uses = list(self._last.values())
            heapify(self._uses)

    def give_up(self) -> Expert:
        """The expert whose turn it is to go: last used in the earliest step, of those chosen by the fewest tokens."""
        while True:
            use = heappop(self._uses)
            expert = use[2]
            if self._last.get(expert) == use:
                del self._last[expert]
                return expert


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
        await self._schedule(step)

    async def decode(self, step: Step) -> None:
        await self._schedule(step)

    async def _schedule(self, step: Step) -> None:
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

    def _run_experts(self, step: Step, i: int, routed: Sequence[Mapping[int, int]]) -> None:
        needed: dict[int, list[int]] = {}
        for counts in routed:
            for expert, tokens in counts.items():
                needed.setdefault(expert, []).append(tokens)
        hits: list[int] = []
        misses: list[int] = []
        for expert in sorted(needed):
            there = self.cache.count((i, expert), sum(needed[expert]))
            (hits if there else misses).append(expert)
        fetched, on_host = self._split(hits, misses, needed)
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
            if len(self.cache) > self.room:
                self.pool.evict(step, self.cache.give_up())
        for j in back:
            step.load_routed(i, j)

    def _run_here(self, step: Step, i: int, expert: int, routed: Sequence[Mapping[int, int]]) -> None:
        self.cache.use((i, expert), step.index)
        for j in step.micro_batches:
            if expert in routed[j]:
                step.run_expert(i, expert, j)

    def _split(
        self, hits: Sequence[int], misses: Sequence[int], needed: Mapping[int, Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """Which of the missing experts are fetched, in this order, and which ones run on the host.

        A fetch takes as long for many tokens as for few, so that those with the most tokens are fetched.
        """
        most_first = sorted(misses, key=lambda expert: -sum(needed[expert]))
        if not self.has_host:
            return most_first, []
        at_host, at_accelerator = self.latencies.at_host, self.latencies.at_accelerator
        here = sum(at_accelerator(tokens) for expert in hits for tokens in needed[expert])
        there = [sum(map(at_host, needed[expert])) for expert in most_first]
        host, link = sum(there), 0.0
        best, end = 0, max(here, host)
        for count, expert in enumerate(most_first, 1):
            link += self.latencies.transfer
            here = max(here, link) + sum(map(at_accelerator, needed[expert]))
            host -= there[count - 1]
            if max(here, host) <= end:
                best, end = count, max(here, host)
        return most_first[:best], sorted(most_first[best:])
