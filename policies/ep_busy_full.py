"""Busy full loading: every node runs all its experts in every layer (P-LB of the Apple silicon cluster paper, 4.2)."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.dispatch.node_placement import assign
from moesched.dispatch.node_steps import NodeExperts, run_own
from moesched.steps.step import Step


class EpBusyFull(NodeExperts):
    """Runs, on each node, all experts that it holds, so that none idles; discards unneeded outputs.

    Settings:
        decentralised: True to have every node compute attention, routing and the sums of expert outputs, with one
            exchange among nodes per layer; False to have only the first node do so, with two exchanges per layer.
    """

    def run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        own = run_own(step, i, j, assign(routed, self.placement))
        for expert in sorted(self.placement[step.node]) if routed else ():
            if expert not in own:
                step.warm_expert(i, expert, j)
