"""Mixtral-Offloading (Eliseev and Mazur 2023): each layer has an LRU cache of its experts on the GPU.

As in the published code, all other weights stay on the GPU, cached experts run first, and a missing expert is fetched
to a buffer while the experts before it compute. The published code also copies evicted experts back to the host, and
makes copies wait for kernels. Here evicted experts are not copied, and copies and kernels overlap, which favours this
policy.
"""

from __future__ import annotations

from collections.abc import Callable

from moesched.dispatch.cached_experts import CachedExperts
from moesched.dispatch.eviction import LeastRecentlyUsed
from moesched.dispatch.expert_placement import Routed, tokens_of, users_of
from moesched.dispatch.expert_pool import ExpertPool, all_fit, experts_that_fit, host_has_experts
from moesched.dispatch.kv_placement import place_kv_and_dense
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.setting_limits import require_at_least
from moesched.errors import BadInput
from moesched.steps.eviction import Eviction
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class LruOffload(LayerByLayer):
    """Runs all experts on the accelerator; a missing one replaces the least recently used of its layer.

    Settings:
        offload_per_layer: number of experts per layer outside the layer's cache; by default the fewest that memory
            allows.
        buffers: number of slots beside the caches, for experts of any layer that arrive before another is evicted.
    """

    rule: Callable[[], Eviction] = LeastRecentlyUsed
    """A function that makes the rule of eviction of each layer's cache."""

    def __init__(self, offload_per_layer: int = -1, buffers: int = 4) -> None:
        require_at_least(-1, offload_per_layer=offload_per_layer)
        require_at_least(1, buffers=buffers)
        self.offload_per_layer = offload_per_layer
        self.buffers = buffers

    def plan(self, plan: Plan) -> None:
        place_kv_and_dense(plan, experts=self.buffers)
        layout, rooms = plan.layout, self._rooms(plan)
        # The published code offloads the first ones.
        held = [
            [(i, expert) for expert in experts[len(experts) - rooms[i] :]]
            for i, experts in enumerate(map(layout.experts_of, plan.layers))
        ]
        self.cached = [CachedExperts(plan.layout, self.rule(), len(each), each) for each in held]
        self.offloads = sum(rooms) < sum(len(layout.experts_of(i)) for i in plan.layers)
        if self.offloads:
            filled = [expert for each in held for expert in each]
            self.pool = ExpertPool(plan, len(filled) + self.buffers, filled, on_host=host_has_experts(plan))
        else:
            plan.keep([page for page in plan.layout.pages if page.expert >= 0])

    def _rooms(self, plan: Plan) -> list[int]:
        """Return the size of each layer's cache in experts; 0 for layers that have none."""
        room = plan.layout.config.routed.experts - self._offloaded(plan)
        return [room if plan.layout.experts_of(i) else 0 for i in plan.layers]

    def _offloaded(self, plan: Plan) -> int:
        """Return the number of experts per layer outside the layer's cache.

        Raises:
            BadInput: the setting is larger than the number of experts in a layer.
        """
        experts = plan.layout.config.routed.experts
        if self.offload_per_layer > experts:
            raise BadInput(
                f"offload_per_layer is {self.offload_per_layer}, but a layer of "
                f"{plan.layout.config.name} has {experts} experts: give 0 to {experts}, or omit it for the fewest"
            )
        if self.offload_per_layer >= 0:
            return self.offload_per_layer
        if all_fit(plan):
            return 0
        routed = sum(bool(plan.layout.experts_of(i)) for i in plan.layers)
        room = max(0, experts_that_fit(plan) - self.buffers) // routed
        return max(1, experts - room)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        """Run a layer's cached experts first; fetch each missing expert once for all micro-batches, and run it."""
        cache, users = self.cached[i], users_of(routed)
        hits = cache.hits(i, tokens_of(routed), step.index)
        for expert in hits:
            self.run_expert(step, i, expert, users[expert])
        for expert in sorted(users.keys() - hits):
            self.pool.fetch(step, (i, expert))
            self.run_expert(step, i, expert, users[expert])
            gone = cache.enter((i, expert), step.index)
            if gone is not None:
                self.pool.evict(step, gone)
