"""A cache of experts with slots of its own on the accelerator."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.dispatch.cached_experts import CachedExperts
from moesched.dispatch.expert_placement import Expert, Routed, order_of, popularity_of, tokens_of
from moesched.dispatch.expert_pool import ExpertPool, all_fit, experts_that_fit, host_has_experts
from moesched.dispatch.setting_limits import require_at_most
from moesched.routing.scores import ScoredTokens
from moesched.steps.eviction import Eviction
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class PooledExperts(CachedExperts):
    """A cache of experts with a pool of slots on the accelerator.

    If all experts fit, all are kept and there is no pool.

    Create the object in `plan`, after all other declarations for the accelerator's memory.

    Args:
        rule: the eviction rule, or its class; no other cache may use the same object.
        order: all experts; those to keep come first. Before the first step, the cache is filled with experts from the
            start of this order. By default, the order takes one expert of every layer, then a second of every layer,
            and so on.
        most: the largest number of experts in the cache; if negative, as many as fit.
        buffers: number of experts that the pool has room for beyond the cache, so that an expert can arrive before
            another leaves.

    Attributes:
        pool: the slots of cache and buffers; None if all experts are kept.
        on_host: whether the host can run experts that are not in the cache; the plan then keeps all experts in host
            memory.
    """

    def __init__(
        self,
        plan: Plan,
        rule: Eviction | type[Eviction],
        order: Sequence[Expert] | None = None,
        *,
        most: int = -1,
        buffers: int = 1,
    ) -> None:
        order = order_of("balanced", popularity_of(plan)) if order is None else order
        self.pool: ExpertPool | None = None
        self.on_host = False
        room = len(order)
        require_at_most(room, f"{plan.layout.config.name} has {room:,} experts", experts=most)
        if (most < 0 or most == room) and all_fit(plan):
            plan.keep([page for page in plan.layout.pages if page.expert >= 0])
        else:
            self.on_host = host_has_experts(plan)
            if self.on_host:
                plan.run_experts_on_host()
            fit = max(0, experts_that_fit(plan) - buffers)
            room = fit if most < 0 else most
            self.pool = ExpertPool(plan, room + buffers, order[:room], on_host=self.on_host)
        super().__init__(plan.layout, rule, room, order[:room])

    def routed(self, step: Step, layer: int, routed: Routed) -> list[int]:
        """Report a layer's chosen experts to the eviction rule, with router scores if the plan requests them.

        routed: for each micro-batch, the number of its tokens that chose each expert.

        Returns:
            The chosen experts that are in the cache, in ascending order.
        """
        for chosen in routed.values():
            if isinstance(chosen, ScoredTokens):
                self.scored(layer, chosen.scores)
        return self.hits(layer, tokens_of(routed), step.index)

    def arrived(self, step: Step, expert: Expert) -> bool:
        """Test whether an expert is on the accelerator now (see `Step.arrived`)."""
        return self.pool is None or self.pool.arrived(step, expert)

    def fetch(self, step: Step, expert: Expert) -> None:
        """Fetch an expert that is needed now into a buffer.

        After the expert's `run_expert` is submitted, the caller must call `admit`.
        """
        assert self.pool is not None, "an expert that is kept is never missing"
        self.pool.fetch(step, expert)

    def admit(self, step: Step, expert: Expert) -> None:
        """Count an expert as cached, not as in a buffer; free the slots of the expert that leaves the cache for it."""
        gone = self.enter(expert, step.index)
        if gone is not None and self.pool is not None:
            self.pool.evict(step, gone)

    def prefetch(self, step: Step, expert: Expert) -> bool:
        """Fetch an expert that may be needed later, and count it as cached at once.

        Nothing is fetched if the eviction rule would evict this very expert first, or if all experts are kept.

        Returns:
            Whether the expert is fetched.
        """
        gone = self.enter(expert, step.index)
        if gone == expert or self.pool is None:
            return False
        self.pool.prefetch(step, expert)
        if gone is not None:
            self.pool.evict(step, gone)
        return True

    def withdraw(self, step: Step, expert: Expert) -> None:
        """Drop a prefetched expert that is not needed: cancel transfers not yet started, and free its slots."""
        if self.pool is not None and expert in self:
            self.remove(expert)
            self.pool.withdraw(step, expert)
