"""Least-Stale of SpecMD (Hoang et al. 2026, arXiv 2602.03921): prefetched experts share a small cache.

Layers take turns, so the least recently used expert may be the next one that is needed. This cache evicts experts of
earlier steps before those of the present one, and so keeps what was prefetched for layers to come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesched.dispatch.cached_layers import CachedLayers
from moesched.dispatch.eviction import LeastStale
from moesched.dispatch.expert_placement import tokens_of
from moesched.dispatch.kv_placement import place_kv_and_dense
from moesched.dispatch.pooled_experts import PooledExperts
from moesched.dispatch.setting_limits import require_at_least
from moesched.steps.eviction import Eviction
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class LeastStaleCache(CachedLayers):
    """Runs all experts on the accelerator, and prefetches those that the next layer is expected to choose.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        prefetches: the largest number of experts of the next layer that are prefetched.
    """

    rule: Callable[[], Eviction] = LeastStale
    """A function that makes the cache's rule of eviction."""

    def __init__(self, experts: int = -1, prefetches: int = 8) -> None:
        require_at_least(-1, experts=experts)
        require_at_least(0, prefetches=prefetches)
        self.most, self.most_ahead = experts, prefetches

    def plan(self, plan: Plan) -> None:
        place_kv_and_dense(plan, experts=1)
        self.cache_in(PooledExperts(plan, self.rule(), most=self.most))
        self.ahead = 0 if self.cache.pool is None else min(self.most_ahead, len(self.cache) - 1)

    async def route_and_run(self, step: Step, i: int, micro_batches: Sequence[int]) -> None:
        routing = {j: step.route(i, j) for j in micro_batches}
        following = micro_batches if self.ahead and i + 1 in step.layers else ()
        previews = {j: step.preview_route(i + 1, j) for j in following}
        routed = {j: await handle for j, handle in routing.items()}
        self.run_experts(step, i, routed)
        expected = tokens_of({j: await handle for j, handle in previews.items()})
        for expert in sorted(expected, key=lambda expert: (-expected[expert], expert))[: self.ahead]:
            self.prefetches.fetch(step, (i + 1, expert))
