"""Twiddler's expert execution strategy (the Fiddler paper of ICLR'25, Algorithm 1), for one request at a time.

Popular experts stay on the GPU. For any other one that tokens were routed to, the policy compares what the CPU would
take with what moving the weights to the GPU and computing there would.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesched.expert_latencies import ExpertLatencies
from moesched.plan import Plan
from moesched.step import Step

from .expert_placement import keep_dense, keep_experts, leave_on_host, order_of, popularity_of
from .kv_placement import attend, place_kv_that_fits

VISITORS = 2
"""Experts that are moved have room on the accelerator while the one before runs."""


class Twiddler:
    """Each expert by itself, in ascending order: on the GPU if it stays there or is moved there and done sooner.

    Latencies are those of the machine's cost model. An expert that was moved is given up again, as in the paper. Where
    accelerator and host share a memory, an expert that does not stay has to be fetched in any case.

    Settings:
        placement: which experts stay: popular, worst, random, front or balanced.
        popularity: a CSV file of how often each expert was chosen (layer, expert, count).
        experts: how many stay on the accelerator at most; by default as many as fit.
        seed: of a random placement.
    """

    def __init__(
        self, placement: str = "popular", popularity: str = "", experts: int = -1, seed: int = 0
    ) -> None:
        self.placement = placement
        self.popularity = popularity
        self.most = None if experts < 0 else experts
        self.seed = seed

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(2)
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

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attend(step, i, j)
                self._run_experts(step, i, j, await step.route(i, j))
                step.combine(i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    def _run_experts(self, step: Step, i: int, j: int, inp_size: Mapping[int, int]) -> None:
        """Algorithm 1; experts without tokens are not in `inp_size`."""
        on_host = False
        for expert, s in inp_size.items():
            if (i, expert) in self.at_gpu:
                step.run_expert(i, expert, j)
            elif not self.has_host or self.cpu_lat(s) > self.gpu_lat(s) + self.trans_lat:
                self._visit(step, i, expert, j)
            else:
                if not on_host:
                    step.offload_routed(i, j)
                on_host = True
                step.run_expert(i, expert, j, at="host")
        if on_host:
            step.load_routed(i, j)

    def _visit(self, step: Step, i: int, expert: int, j: int) -> None:
        pages = step.expert_pages(i, expert)
        step.fetch(pages, self.visitors, source=self.held, urgent=True)
        step.run_expert(i, expert, j)
        step.evict(pages, self.visitors)
