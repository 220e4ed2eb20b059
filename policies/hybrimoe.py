"""HybriMoE (Zhong et al. 2025, arXiv 2504.05897): CPU and GPU share each layer; scores decide what is cached.

Its three ideas: the experts of a layer are divided so that both processors and the link end together, those with few
tokens on the host; of the next three layers' experts, the one whose arrival would shorten its layer most is prefetched;
and the cache evicts the expert with the lowest average router score. The paper divides a layer greedily; here the
division is the best one for the machine's latencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moesched.dispatch.cached_experts import CachedExperts
from moesched.dispatch.eviction import LowestScore
from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import (
    Routed,
    keep_dense,
    order_of,
    popularity_of,
    tokens_of,
    users_of,
)
from moesched.dispatch.expert_pool import ExpertPool, experts_that_fit, host_has_experts
from moesched.dispatch.kv_placement import place_kv_that_fits
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.layer_decisions import LayerDecisions
from moesched.dispatch.prefetches import Prefetches
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class HybriMoE(LayerByLayer):
    """Divides each layer between host and accelerator, prefetches by impact, and caches by score.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        ahead: number of layers that are previewed.
        buffers: slots beside the cache; all but one may hold prefetched experts.
    """

    def __init__(self, experts: int = -1, ahead: int = 3, buffers: int = 4) -> None:
        self.most, self.ahead, self.buffers = experts, ahead, max(1, buffers)

    def plan(self, plan: Plan) -> None:
        plan.request_scores()
        place_kv_that_fits(plan, experts=self.buffers)
        keep_dense(plan)
        on_host = host_has_experts(plan)
        if on_host:
            plan.run_experts_on_host()
        order = order_of("balanced", popularity_of(plan))
        room = max(0, min(experts_that_fit(plan) - self.buffers, len(order)))
        first = order[: room if self.most < 0 else self.most]
        self.cache = CachedExperts(plan.layout, LowestScore(), len(first), first)
        self.pool = ExpertPool(plan, len(first) + self.buffers, first, on_host=on_host)
        self.prefetches = Prefetches(self.pool)
        self.latencies = ExpertLatencies(plan)
        self.decisions = LayerDecisions(self.latencies, on_host=on_host)

    async def _route_and_run(self, step: Step, i: int, micro_batches: Sequence[int]) -> None:
        routing = {j: step.route(i, j) for j in micro_batches}
        later = [n for n in range(i + 1, i + 1 + self.ahead) if n in step.layers]
        previews = {n: {j: step.preview_route(n, j) for j in micro_batches} for n in later}
        routed = {j: await handle for j, handle in routing.items()}
        for each in routed.values():
            self.cache.scored(i, dict(enumerate(each.scores)))
        arriving = self.prefetches.settle(step, i, routed)
        self._run_experts(step, i, routed, arriving)
        expected = {n: {j: await each for j, each in of.items()} for n, of in previews.items()}
        self._prefetch(step, i, expected)

    def _run_experts(self, step: Step, i: int, routed: Routed, arriving: Iterable[int] = ()) -> None:
        tokens, users = tokens_of(routed), users_of(routed)
        here = {*self.cache.hits(i, tokens, step.index), *arriving}
        resident, missing = self._by_tokens(tokens, here)
        choice = self.decisions.of([tokens[e] for e in resident], [tokens[e] for e in missing], len(routed))
        fetched = [missing[place] for place in choice.fetched]
        self.layer_seconds = choice.seconds
        back = self._run_on_host(step, i, [e for e in missing if e not in fetched], users)
        for expert in resident:
            self._run(step, i, expert, users[expert])
        for expert in (*sorted(arriving), *fetched):
            if expert not in here:
                self.pool.fetch(step, (i, expert))
                self._run(step, i, expert, users[expert])
            gone = self.cache.enter((i, expert), step.index)
            if gone is not None:
                self.pool.evict(step, gone)
        for j in back:
            step.load_routed(i, j)

    def _prefetch(self, step: Step, i: int, expected: Mapping[int, Routed]) -> None:
        """Prefetch the experts whose arrival shortens their layers most, while there are buffers."""
        while len(self.prefetches) < self.buffers - 1:
            gains = [self._gain(n, routed, (n - i) * self.layer_seconds) for n, routed in expected.items()]
            seconds, layer, expert = max(gains, default=(0.0, -1, -1))
            if seconds <= 0.0:
                return
            self.prefetches.fetch(step, (layer, expert))

    def _gain(self, i: int, routed: Routed, begins: float) -> tuple[float, int, int]:
        """The seconds by which a layer would end earlier with its largest missing expert prefetched; and that expert.

        begins: seconds until the layer begins.
        """
        tokens = tokens_of(routed)
        resident, missing = self._by_tokens(tokens, [e for e in tokens if (i, e) in self.pool])
        if not missing:
            return 0.0, i, -1
        here, there = [tokens[e] for e in resident], [tokens[e] for e in missing]
        now = self.decisions.of(here, there, len(routed)).seconds
        then = self.decisions.of(sorted([*here, there[0]]), there[1:], len(routed)).seconds
        late = (len(self.prefetches) + 1) * self.latencies.transfer - begins
        return now - then - max(0.0, late), i, missing[0]

    def _by_tokens(self, tokens: Mapping[int, int], here: Iterable[int]) -> tuple[list[int], list[int]]:
        """The experts that are on the accelerator, those with few tokens first, and the others, with many first."""
        return sorted(here, key=tokens.__getitem__), sorted(
            tokens.keys() - here, key=lambda e: (-tokens[e], e)
        )
