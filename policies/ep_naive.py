"""Experts on several nodes; each expert runs on the node that holds it (naive, Apple silicon cluster paper, 3.2)."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.dispatch.node_placement import assign
from moesched.dispatch.node_steps import NodeExperts, run_own
from moesched.steps.step import Step


class EpNaive(NodeExperts):
    """Runs, on each node, the chosen experts that it holds.

    The first node does everything else, and exchanges twice a layer.

    Settings:
        decentralised: True to have every node attend, route and add up, and exchange once a layer.
    """

    def __init__(self, decentralised: bool = False) -> None:
        super().__init__(decentralised)

    def run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        run_own(step, i, j, assign(routed, self.placement))
