"""Twiddler's expert execution strategy (the Fiddler paper of ICLR'25, Algorithm 1), for one request at a time.

Popular experts stay on the GPU. For each other chosen expert, the policy compares the latency on the CPU with the time
to move the weights to the GPU and compute there.
"""

from __future__ import annotations

from collections.abc import Iterable

from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import (
    Routed,
    keep_experts,
    leave_on_host,
    order_of,
    popularity_of,
    seconds_of,
    users_of,
)
from moesched.dispatch.kv_placement import place_kv_and_dense
from moesched.dispatch.layer_by_layer import LayerByLayer
from moesched.dispatch.setting_limits import require_at_least, require_at_most
from moesched.steps.plan import Plan
from moesched.steps.step import Step

VISITORS = 2
"""Slots for moved experts: one is fetched while the previous one runs."""


class Twiddler(LayerByLayer):
    """Decides for each expert alone: the GPU if it has the weights or moving them is faster, else the CPU.

    Experts are decided in ascending order, by the latencies of the machine's cost model. A moved expert is evicted
    after use, as in the paper. If accelerator and host share a memory, an expert that is not resident is always
    fetched.

    Settings:
        placement: the experts that are kept first: popular (the most popular), worst (the least popular), random, front
            (those of the first layers), or balanced (the most popular of each layer).
        popularity: a CSV file of each expert's count (layer, expert, count).
        experts: the largest number of experts that stay on the accelerator; by default as many as fit.
        seed: seed of a random placement.
    """

    together = 8
    """Most chunks of a prompt in a layer at once: more take more memory, fewer make experts move more often."""

    def __init__(
        self, placement: str = "popular", popularity: str = "", experts: int = -1, seed: int = 0
    ) -> None:
        require_at_least(-1, experts=experts)
        self.placement = placement
        self.popularity = popularity
        self.most = None if experts < 0 else experts
        self.seed = seed

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(self.together)
        place_kv_and_dense(plan, experts=2)
        order = order_of(self.placement, popularity_of(plan, self.popularity), self.seed)
        if self.most is not None:
            require_at_most(
                len(order), f"{plan.layout.config.name} has {len(order)} experts", experts=self.most
            )
        self.latencies = latencies = ExpertLatencies(plan)
        self.cpu_lat, self.gpu_lat = latencies.at_host, latencies.at_accelerator
        self.trans_lat = latencies.transfer
        self.has_host = not plan.machine.unified
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        if self.most is None and sum(map(plan.slot_bytes, experts)) <= plan.free("accelerator"):
            self.at_gpu = keep_experts(plan, order)
            return
        plan.run_experts_on_host()
        self.visitors = plan.pool("accelerator", "visitors", VISITORS * len(plan.layout.an_expert), experts)
        self.at_gpu = keep_experts(plan, order, self.most)
        self.held = leave_on_host(plan, self.at_gpu) if self.has_host else None

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        """Run Algorithm 1 for the experts of a layer; an expert's latencies are summed over all micro-batches."""
        users_by_expert = users_of(routed)
        cpu_lat = seconds_of(self.cpu_lat, routed, users_by_expert)
        gpu_lat = seconds_of(self.gpu_lat, routed, users_by_expert)
        back: set[int] = set()
        for expert, users in users_by_expert.items():
            if (i, expert) in self.at_gpu:
                self.run_expert(step, i, expert, users)
            elif not self.has_host or cpu_lat[expert] > gpu_lat[expert] + self.trans_lat:
                self._visit(step, i, expert, users)
            else:
                self._offload(step, i, users, back)
                self.run_expert(step, i, expert, users, "host")
        self.load_back(step, i, sorted(back))

    def _offload(self, step: Step, i: int, users: Iterable[int], back: set[int]) -> None:
        """Copy rows of micro-batches to the host, unless they are there already.

        Args:
            users: numbers of the micro-batches.
            back: numbers of the micro-batches whose rows are on the host; `users` are added to it.
        """
        for j in users:
            if j not in back:
                step.offload_routed(i, j)
                back.add(j)

    def _visit(self, step: Step, i: int, expert: int, users: Iterable[int]) -> None:
        pages = step.expert_pages(i, expert)
        step.fetch(pages, self.visitors, source=self.held, urgent=True)
        self.run_expert(step, i, expert, users)
        step.evict(pages, self.visitors)
