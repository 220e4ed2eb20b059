"""Experts on several nodes, each run where it is held (naive, in the Apple silicon cluster paper, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.parallel.placement import assign, mirrored
from moesched.plan import Plan
from moesched.step import Step

from .node_experts import attend, embed_all, plan_dense, run_own


class EpNaive:
    """A node runs those of its experts that were chosen. The first node does all else, and exchanges twice a layer.

    Settings:
        decentralised: have every node attend, route and add up, and exchange once a layer.
    """

    expert_parallel = True

    def __init__(self, decentralised: bool = False) -> None:
        self.decentralised = decentralised

    def plan(self, plan: Plan) -> None:
        self.placement = mirrored(plan.layout.config.experts, plan.nodes)
        plan_dense(plan, decentralised=self.decentralised)
        plan.place_experts(self.placement)

    async def prefill(self, step: Step) -> None:
        embed_all(step)
        for i in step.layers:
            for j in step.micro_batches:
                attend(step, i, j)
                self._run_experts(step, i, j, await step.route(i, j))
                step.combine(i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    def _run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        run_own(step, i, j, assign(routed, self.placement))
