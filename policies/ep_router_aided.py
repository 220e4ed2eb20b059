"""Router-aided dynamic loading: all nodes run as many experts as the busiest one (P-L_R of the Apple silicon cluster
paper, section 4.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moesched.parallel.placement import assign, mirrored
from moesched.plan import Plan
from moesched.step import Step

from .node_experts import LeastRecent, attend, embed_all, plan_dense, run_own


class EpRouterAided:
    """Where the busiest node runs more experts than this one, it runs others too, those that were used longest ago.

    So no weights lie idle for long, and no node is busier than the busiest one was.

    Settings:
        decentralised: have every node attend, route and add up, and exchange once a layer; otherwise the first node
            does all that, and exchanges twice.
    """

    expert_parallel = True

    def __init__(self, decentralised: bool = True) -> None:
        self.decentralised = decentralised

    def plan(self, plan: Plan) -> None:
        self.placement = mirrored(plan.layout.config.experts, plan.nodes)
        plan_dense(plan, decentralised=self.decentralised)
        plan.place_experts(self.placement)
        self.recent = LeastRecent(self.placement[plan.node])

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
        owners = assign(routed, self.placement)
        own = run_own(step, i, j, owners)
        quota = max(Counter(owners.values()).values())
        spare = self.recent.first(quota - len(own), without=own)
        for expert in spare:
            step.touch_expert(i, expert, j)
        self.recent.use([*own, *spare])
