"""Speculative expert loading (Eliseev and Mazur 2023): the next layer's router, run one layer early, names prefetches.

The hidden state changes little from layer to layer, so the next layer's router forecasts most of its experts from this
layer's hidden state. Forecast experts are fetched to buffers, page by page, when the link is otherwise idle; a used
expert enters the cache. Wrong forecasts are cancelled: a transfer that has not started moves no byte, and one under way
delays others by one page at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.dispatch.expert_placement import Routed, tokens_of
from moesched.dispatch.prefetches import Prefetches
from moesched.errors import BadInput
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .lru_offload import LruOffload


class PrefetchGate(LruOffload):
    """The caches of `lru_offload`, with prefetches into all buffers but one, which is for missing experts.

    Settings:
        offload_per_layer: number of experts per layer outside the layer's cache; by default the fewest that memory
            allows.
        buffers: number of slots beside the caches, for experts of any layer; all but one may hold prefetched experts.
    """

    def __init__(self, offload_per_layer: int = -1, buffers: int = 4) -> None:
        if buffers < 2:
            raise BadInput(f"buffers is {buffers}: give 2 or more, since one is for missing experts")
        super().__init__(offload_per_layer, buffers)

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.routes = {i for i in plan.layers if plan.layout.experts_of(i)}
        if self.offloads:
            self.prefetches = Prefetches(self.pool)

    async def route_and_run(self, step: Step, i: int, micro_batches: Sequence[int]) -> None:
        routing = {j: step.route(i, j) for j in micro_batches}
        following = micro_batches if self.offloads and i + 1 in self.routes else ()
        previews = {j: step.preview_route(i + 1, j) for j in following}
        routed = {j: await handle for j, handle in routing.items()}
        if self.offloads:
            self.prefetches.settle(step, i, routed)
        self.run_experts(step, i, routed)
        self._prefetch(step, i + 1, {j: await handle for j, handle in previews.items()})

    def _prefetch(self, step: Step, i: int, foretold: Routed) -> None:
        """Prefetch forecast experts of a layer that are not in memory, those with the most tokens first.

        Args:
            foretold: the forecast number of tokens of each expert, by micro-batch.
        """
        tokens = tokens_of(foretold)
        missing = [expert for expert in tokens if (i, expert) not in self.cached[i]]
        missing.sort(key=tokens.__getitem__, reverse=True)
        for expert in missing[: self.buffers - 1]:
            self.prefetches.fetch(step, (i, expert))
