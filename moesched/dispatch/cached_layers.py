"""Base of policies whose experts all run on the accelerator, from a cache that also holds prefetched experts."""

from __future__ import annotations

from moesched.dispatch.expert_placement import Routed, users_of
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.pooled_experts import PooledExperts
from moesched.dispatch.prefetches import Prefetches
from moesched.steps.step import Step


class CachedLayers(LayerByLayer):
    """Base of policies that run every expert on the accelerator, and prefetch experts of later layers.

    A policy defines `plan` and `route_and_run`. In `plan` it calls `cache_in`, which sets the attribute `prefetches`, a
    record of prefetched experts. In `route_and_run` it calls `self.prefetches.fetch`.
    """

    def cache_in(self, cache: PooledExperts) -> None:
        """Set the cache from which experts run and into which experts are prefetched; call this method in `plan`."""
        self.cache = cache
        self.prefetches = Prefetches(cache)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        """Run the chosen experts of layer i: those in the cache first, then the others as their weights arrive.

        routed: for each micro-batch, the number of its tokens that chose each expert.
        """
        users = users_of(routed)
        coming = self.prefetches.settle(step, i, routed)
        hits = self.cache.routed(step, i, routed)
        for expert in (*hits, *sorted(users.keys() - hits)):
            if expert in coming or expert not in hits:
                self.cache.fetch(step, (i, expert))
            self.run_expert(step, i, expert, users[expert])
            if expert not in hits:
                self.cache.admit(step, (i, expert))
