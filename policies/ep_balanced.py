"""Experts on several nodes that overlap: held by more nodes than one, and run by those that have least to do.

The cluster paper's placement mirrors two halves, so that a node can only help its twin. Here nodes overlap in pairs, as
few experts as possible being the busiest node's. None is run for nothing, but where the machine unwires weights that
lie idle: there a node that would wait uses those that it used longest ago, and any that several tokens have not used.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesched.dispatch.node_placement import Placement, assign_by_rows, best_placement
from moesched.dispatch.node_steps import (
    LeastRecent,
    NodeExperts,
    experts_that_fit,
    run_own,
    warm_spare,
)
from moesched.errors import BadInput
from moesched.steps.plan import Plan
from moesched.steps.step import Step

IDLE_TOKENS = 3
"""After so many tokens an expert that none has used is used: on M2 Ultras, half of the time until it is unwired."""


class EpBalanced(NodeExperts):
    """The best overlapping placement for the nodes' memory, and in each layer the best assignment of what was chosen.

    Settings:
        experts: how many of each layer a node holds at most; by default as many as fit.
        decentralised: have every node attend, route and add up, and exchange once a layer; otherwise the first node
            does all that, and exchanges twice.
    """

    def __init__(self, experts: int = -1, decentralised: bool = True) -> None:
        super().__init__(decentralised)
        if experts == 0 or experts < -1:
            raise BadInput(f"experts is {experts}: give 1 or more, or -1 for as many as fit")
        self.most = experts

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.recent = LeastRecent(self.placement[plan.nodes.index]) if plan.machine.wired_memory else None

    def _placement(self, plan: Plan) -> Placement:
        config, nodes = plan.layout.config, plan.nodes.count
        room = self.most if self.most > 0 else experts_that_fit(plan, centralised=not self.decentralised)
        held = min(config.experts, max(room, -(-config.experts // nodes)))
        return best_placement(config.experts, config.top_k, nodes, held)

    def _run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        owners = assign_by_rows(routed, self.placement)
        own = run_own(step, i, j, owners)
        if self.recent is not None:
            idle = self.recent.idle_for(IDLE_TOKENS * len(step.layers))
            warm_spare(step, i, j, owners, own, self.recent, idle)
