"""Expert parallelism with copies: several nodes hold an expert, and the least loaded one runs it.

The placement of the Apple silicon cluster paper (RACS'24) gives one half of the experts to every second node and the
other half to the rest, so that a node can only relieve nodes with the same half. Here any two nodes may share experts,
which lowers the load of the busiest node. Where the GPU's driver unwires idle weights, each node warms experts (runs
them on zeros, only to read their weights): those unused for several tokens and, while the node would wait for others,
its least recently used ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesched.dispatch.node_placement import Placement, assign_by_rows, best_placement
from moesched.dispatch.node_steps import (
    LeastRecent,
    NodeExperts,
    experts_per_node,
    run_own,
    warm_spare,
)
from moesched.dispatch.setting_limits import require_at_most
from moesched.errors import BadInput
from moesched.steps.plan import Plan
from moesched.steps.step import Step

IDLE_TOKENS = 3
"""Tokens without a use of an expert after which the node warms it: half of the time until an M2 Ultra unwires it."""


class EpBalanced(NodeExperts):
    """Uses the best overlapping placement in the nodes' memory, and the best assignment in each layer.

    Settings:
        experts: the largest number of experts of each layer that a node holds; by default as many as fit.
        decentralised: True to have every node attend, route and add up, and exchange once a layer; False to have the
            first node do all that, and exchange twice.
    """

    def __init__(self, experts: int = -1, decentralised: bool = True) -> None:
        super().__init__(decentralised)
        if experts == 0 or experts < -1:
            raise BadInput(f"experts is {experts}: give 1 or more, or -1 for as many as fit")
        self.most = experts

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.recent = LeastRecent(self.placement[plan.nodes.index]) if plan.machine.wired_memory else None

    def choose_placement(self, plan: Plan) -> Placement:
        config, nodes = plan.layout.config, plan.nodes.count
        experts = config.routed.experts
        require_at_most(experts, f"a layer of {config.name} has {experts} experts", experts=self.most)
        room = self.most if self.most > 0 else experts_per_node(plan, centralised=not self.decentralised)
        held = min(experts, max(room, -(-experts // nodes)))
        return best_placement(experts, config.routed.top_k, nodes, held)

    def run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        owners = assign_by_rows(routed, self.placement)
        own = run_own(step, i, j, owners)
        if self.recent is not None and routed:
            idle = self.recent.idle_for(IDLE_TOKENS * len(step.layers))
            warm_spare(step, i, j, owners, own, self.recent, idle)
