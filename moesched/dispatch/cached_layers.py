"""Base of policies whose experts all run on the accelerator, from a cache that also holds prefetched experts."""

from __future__ import annotations

from moesched.dispatch.expert_placement import Routed, users_of
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.pooled_experts import PooledExperts
from moesched.dispatch.prefetches import Prefetches
from moesched.steps.step import Step


class CachedLayers(LayerByLayer):
    """Base of policies that run every expert on the accelerator, and prefetch experts of later layers.

    A policy defines `plan`, which calls `cache_in`, and calls `prefetches.fetch` in its own `route_and_run`.
    """

    def cache_in(self, cache: PooledExperts) -> None:
        """Set the cache for experts, both those that run and those that are prefetched; call it in `plan`."""
        self.cache = cache
        self.prefetches = Prefetches(cache)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        """Run the chosen experts of layer i: those in the cache first, others as they arrive."""
        users = users_of(routed)
        coming = self.prefetches.settle(step, i, routed)
        hits = self.cache.routed(step, i, routed)
        for expert in (*hits, *sorted(users.keys() - hits)):
            if expert in coming or expert not in hits:
                self.cache.fetch(step, (i, expert))
            self.run_expert(step, i, expert, users[expert])
            if expert not in hits:
                self.cache.admit(step, (i, expert))
