"""A policy in a file outside the package: experts run one by one, and are fetched only when tokens chose them.

    moesched run MODEL --policy examples.on_demand:OnDemand --budget host=300MB --prompt-ids "1,2,3"

Attention and routing need the dense part of a layer, which always stays in memory. An expert is fetched when the router
has chosen it, unless it is still in the cache.
"""

from __future__ import annotations

from moesched import Plan, Step


class OnDemand:
    """Fetch the experts that the router chose, and keep those used last.

    Settings:
        slots: number of experts that fast memory holds.
    """

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.keep([page for i in plan.layers for page in plan.layout.dense(i)])
        expert = plan.layout.expert(0, 0)
        self.cache = plan.pool("accelerator", "experts", self.slots * len(expert), expert, "lru")

    async def prefill(self, step: Step) -> None:
        await self.decode(step)

    async def decode(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
            for i in step.layers:
                step.pre_attention(i, j)
                step.attention(i, j)
                for expert in await step.route(i, j):
                    missing = [page for page in step.expert_pages(i, expert) if page not in self.cache]
                    if missing:
                        step.fetch(missing, self.cache, urgent=True)
                    step.run_expert(i, expert, j)
                step.combine(i, j)
            step.sample(j)
