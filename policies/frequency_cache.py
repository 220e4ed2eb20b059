"""The expert cache proposed for llama.cpp (pull request 24524 and its forks): the host computes what is not cached.

Experts that are in the cache run on the accelerator. All others run on the host without delay, so that no expert waits
for its transfer. An expert that is used again is fetched for later steps, one expert at a time. The cache keeps the
experts that are used most often. To compare them, their counts of uses are rounded down to powers of two; all counts
are halved from time to time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesched.dispatch.eviction import FrequencyClasses
from moesched.dispatch.expert_placement import Expert, Routed, tokens_of, users_of
from moesched.dispatch.kv_placement import place_kv_and_dense
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.pooled_experts import PooledExperts
from moesched.dispatch.setting_limits import require_at_least
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class FrequencyCache(LayerByLayer):
    """Runs cached experts on the accelerator, others on the host; fetches experts that are used again.

    Settings:
        experts: number of experts in the cache; by default as many as fit.
        half_life: number of steps after which the counts of uses are halved.
    """

    def __init__(self, experts: int = -1, half_life: int = 512) -> None:
        require_at_least(-1, experts=experts)
        self.most, self.half_life = experts, half_life

    def plan(self, plan: Plan) -> None:
        self.used: set[Expert] = set()
        self.coming: Expert | None = None
        """The expert that was fetched last, until it has come."""
        plan.request_times()
        place_kv_and_dense(plan, experts=1)
        self.cache = PooledExperts(plan, FrequencyClasses(self.half_life), most=self.most)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        tokens, users = tokens_of(routed), users_of(routed)
        if self.coming is not None and self.cache.arrived(step, self.coming):
            self.coming = None
        cached = self.cache.routed(step, i, routed)
        hits = [expert for expert in cached if (i, expert) != self.coming]
        misses = sorted(users.keys() - hits, key=lambda expert: (-tokens[expert], expert))
        back = self.run_on_host(step, i, misses if self.cache.on_host else [], users)
        for expert in hits:
            self.run_expert(step, i, expert, users[expert])
        if not self.cache.on_host:
            self._fetch_and_run(step, i, misses, users)
            return
        again = [(i, expert) for expert in misses if (i, expert) in self.used]
        self.used.update((i, expert) for expert in misses)
        if again and self.coming is None and self.cache.prefetch(step, again[0]):
            self.coming = again[0]
        self.load_back(step, i, back)

    def _fetch_and_run(
        self, step: Step, i: int, experts: Sequence[int], users: Mapping[int, Sequence[int]]
    ) -> None:
        """Fetch and run the missing experts of a layer, if the host cannot run experts.

        Args:
            users: each expert's micro-batches.
        """
        for expert in experts:
            self.cache.fetch(step, (i, expert))
            self.run_expert(step, i, expert, users[expert])
            self.cache.admit(step, (i, expert))
