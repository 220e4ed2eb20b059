"""Twiddler with the makespan minimised: of all ways to run a layer's experts, the one in which the layer ends first.

`twiddler` (Algorithm 1 of the Fiddler paper) compares, for each expert by itself, the latency on the CPU with that of
moving the expert to the GPU, as if the other experts took no time. If the CPU is faster for every expert, experts queue
there while the link is idle; if moving is faster for every expert, the CPU is idle.
"""

from __future__ import annotations

from moesched.dispatch.expert_placement import Routed, users_of
from moesched.dispatch.layer_decisions import LayerDecisions
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .twiddler import VISITORS, Twiddler


class TwiddlerMakespan(Twiddler):
    """Keeps popular experts on the accelerator; decides jointly where a layer's other experts run.

    Fetches, kernels and CPU experts overlap, and share the host's memory. A resident expert may also run on the CPU, if
    the host's memory has its weights. The settings are those of `twiddler`.
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        if plan.declared.experts_on_host:
            plan.run_experts_on_host(resident=True)
        self.decisions = LayerDecisions(
            self.latencies,
            on_host=self.has_host,
            resident_on_host=plan.declared.resident_experts_on_host,
        )
        self.stays = [{expert for layer, expert in self.at_gpu if layer == i} for i in plan.layers]

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        users = users_of(routed)
        division = self.decisions.divide(routed, self.stays[i])
        fetched = division.fetched
        back = self.run_on_host(step, i, division.on_host, users)
        for expert in fetched[:VISITORS]:
            self._fetch(step, i, expert)
        for expert in division.stay:
            self.run_expert(step, i, expert, users[expert])
        for number, expert in enumerate(fetched, start=VISITORS):
            self.run_expert(step, i, expert, users[expert])
            step.evict(step.expert_pages(i, expert), self.visitors)
            if number < len(fetched):
                self._fetch(step, i, fetched[number])
        self.load_back(step, i, back)

    def _fetch(self, step: Step, i: int, expert: int) -> None:
        """Fetch an expert, with less priority than outputs from the host: those are small, and the layer needs them."""
        step.fetch(step.expert_pages(i, expert), self.visitors, source=self.held)
