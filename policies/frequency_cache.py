"""The expert cache proposed for llama.cpp (pull request 24524 and its forks): the host computes what is not cached.

Experts that are in the cache run on the accelerator, all others on the host, at once: nothing waits for a transfer. An
expert that is used again enters the cache for later steps, while the link has nothing else to bring. The cache keeps
those that are used most often, by powers of two, with counts that are halved from time to time.
"""

from __future__ import annotations

from moesched.dispatch.cached_experts import CachedExperts
from moesched.dispatch.eviction import FrequencyClasses
from moesched.dispatch.expert_placement import (
    Expert,
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
from moesched.errors import BadInput
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class FrequencyCache(LayerByLayer):
    """Cached experts run on the accelerator, the others on the host, from where used ones enter the cache.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        half_life: number of steps after which the counts of uses are halved.
    """

    def __init__(self, experts: int = -1, half_life: int = 512) -> None:
        self.most, self.half_life = experts, half_life
        self.used: set[Expert] = set()
        self.coming: Expert | None = None
        """The expert that was fetched last."""

    def plan(self, plan: Plan) -> None:
        if not host_has_experts(plan):
            raise BadInput("frequency_cache needs a host that has all experts: use expert_cache")
        place_kv_that_fits(plan, experts=1)
        keep_dense(plan)
        plan.run_experts_on_host()
        order = order_of("balanced", popularity_of(plan))
        fit = max(0, min(experts_that_fit(plan) - 1, len(order)))
        first = order[: fit if self.most < 0 else self.most]
        self.cache = CachedExperts(plan.layout, FrequencyClasses(self.half_life), len(first), first)
        self.pool = ExpertPool(plan, len(first) + 1, first, on_host=True)

    def _run_experts(self, step: Step, i: int, routed: Routed) -> None:
        tokens, users = tokens_of(routed), users_of(routed)
        cached = self.cache.hits(i, tokens, step.index)
        hits = [expert for expert in cached if self.pool.arrived(step, (i, expert))]
        misses = sorted(users.keys() - hits, key=lambda expert: (-tokens[expert], expert))
        back = self._run_on_host(step, i, misses, users)
        for expert in hits:
            self._run(step, i, expert, users[expert])
        again = [(i, expert) for expert in misses if (i, expert) in self.used and expert not in cached]
        self.used.update((i, expert) for expert in misses)
        if again and (self.coming is None or self.pool.arrived(step, self.coming)):
            self._insert(step, again[0])
        for j in back:
            step.load_routed(i, j)

    def _insert(self, step: Step, expert: Expert) -> None:
        """Fetch an expert for later steps, unless its class is the lowest."""
        gone = self.cache.enter(expert, step.index)
        if gone == expert:
            return
        self.pool.prefetch(step, expert)
        self.coming = expert
        if gone is not None:
            self.pool.evict(step, gone)
