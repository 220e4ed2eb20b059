"""Twiddler's expert execution strategy (the Fiddler paper of ICLR'25, Algorithm 1), for one request at a time.

Popular experts stay on the GPU. For any other one that tokens were routed to, the policy compares what the CPU would
take with what moving the weights to the GPU and computing there would.
"""

from __future__ import annotations

from collections.abc import Iterable

from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import (
    Routed,
    keep_dense,
    keep_experts,
    leave_on_host,
    order_of,
    popularity_of,
    seconds_of,
    users_of,
)
from moesched.dispatch.kv_placement import place_kv_that_fits
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.steps.plan import Plan
from moesched.steps.step import Step

VISITORS = 2
"""Experts that are moved have room on the accelerator while the one before runs."""


class Twiddler(LayerByLayer):
    """Each expert by itself, in ascending order: on the GPU if it stays there or is moved there and done sooner.

    Latencies are those of the machine's cost model. An expert that was moved is given up again, as in the paper. Where
    accelerator and host share a memory, an expert that does not stay has to be fetched in any case.

    Settings:
        placement: which experts stay: popular, worst, random, front or balanced.
        popularity: a CSV file of how often each expert was chosen (layer, expert, count).
        experts: how many stay on the accelerator at most; by default as many as fit.
        seed: of a random placement.
    """

    together = 8
    """More take more memory, for what chunks of a long prompt have within a layer; fewer have experts moved oftener."""

    def __init__(
        self, placement: str = "popular", popularity: str = "", experts: int = -1, seed: int = 0
    ) -> None:
        self.placement = placement
        self.popularity = popularity
        self.most = None if experts < 0 else experts
        self.seed = seed

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(self.together)
        place_kv_that_fits(plan, experts=2)
        keep_dense(plan)
        order = order_of(self.placement, popularity_of(plan, self.popularity), self.seed)
        self.latencies = latencies = ExpertLatencies(plan)
        self.cpu_lat, self.gpu_lat = latencies.at_host, latencies.at_accelerator
        self.trans_lat = latencies.transfer
        self.has_host = not plan.machine.unified
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        if self.most is None and sum(map(plan.slot_bytes, experts)) <= plan.free("accelerator"):
            self.at_gpu = keep_experts(plan, order)
            return
        plan.run_experts_on_host()
        self.visitors = plan.pool(
            "accelerator", "visitors", VISITORS * len(plan.layout.expert(0, 0)), experts
        )
        self.at_gpu = keep_experts(plan, order, self.most)
        self.held = leave_on_host(plan, self.at_gpu) if self.has_host else None

    def _run_experts(self, step: Step, i: int, routed: Routed) -> None:
        """Algorithm 1; an expert's latencies are those of all that the micro-batches have for it."""
        users_by_expert = users_of(routed)
        cpu_lat = seconds_of(self.cpu_lat, routed, users_by_expert)
        gpu_lat = seconds_of(self.gpu_lat, routed, users_by_expert)
        back: set[int] = set()
        for expert, users in users_by_expert.items():
            if (i, expert) in self.at_gpu:
                self._run(step, i, expert, users)
            elif not self.has_host or cpu_lat[expert] > gpu_lat[expert] + self.trans_lat:
                self._visit(step, i, expert, users)
            else:
                self._offload(step, i, users, back)
                self._run(step, i, expert, users, "host")
        for j in sorted(back):
            step.load_routed(i, j)

    def _offload(self, step: Step, i: int, users: Iterable[int], back: set[int]) -> None:
        """Have the host get the rows of those micro-batches of which it has none yet; `back` are all that have."""
        for j in users:
            if j not in back:
                step.offload_routed(i, j)
                back.add(j)

    def _visit(self, step: Step, i: int, expert: int, users: Iterable[int]) -> None:
        pages = step.expert_pages(i, expert)
        step.fetch(pages, self.visitors, source=self.held, urgent=True)
        self._run(step, i, expert, users)
        step.evict(pages, self.visitors)
