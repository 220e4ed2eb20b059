"""Router-aided loading: all nodes run as many experts as the busiest one (P-LR, Apple silicon cluster paper, 4.2)."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.dispatch.node_placement import assign
from moesched.dispatch.node_steps import LeastRecent, NodeExperts, run_own, warm_spare
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class EpRouterAided(NodeExperts):
    """Runs chosen experts, then warms least recently used ones until as many ran as on the busiest node.

    To warm an expert is to run it on zeros, only to read its weights, since a Mac's GPU driver unwires weights that are
    idle for long. The busiest node does no additional work.

    Settings:
        decentralised: True to have every node attend, route and add up, and exchange once a layer; False to have the
            first node do all that, and exchange twice.
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.recent = LeastRecent(self.placement[plan.nodes.index])

    def run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        owners = assign(routed, self.placement)
        warm_spare(step, i, j, owners, run_own(step, i, j, owners), self.recent)
