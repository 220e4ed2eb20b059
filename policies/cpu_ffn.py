"""The MoE FFN on the CPU, as in MoE-Lightning with F_g = 0 (section 4.2); attention runs where the KV cache is.

F_g says whether the GPU computes the FFN. No expert's weights move in decode: hidden states go to the CPU and come
back. Prompts have enough rows to make the transfer of weights pay, so in prefill experts stream to the GPU.
"""

from __future__ import annotations

from moesched.dispatch.expert_placement import keep_dense, leave_on_host
from moesched.dispatch.kv_placement import attend, split_kv
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task

from .expert_streaming import ExpertStreaming


class CpuFFN(ExpertStreaming):
    """Runs one micro-batch's experts on the CPU while the GPU runs attention and router of another.

    Settings:
        together: number of experts in one transfer in prefill.
        ahead: number of transfers that may be under way while the experts of an earlier transfer are in use.
        kv_on_gpu: share (0 to 1) of the KV cache on the GPU, where attention to this share runs (r_c in MoE-Lightning).
    """

    def __init__(self, together: int = 2, ahead: int = 1, kv_on_gpu: float = 1.0) -> None:
        super().__init__(together, ahead)
        self.kv_on_gpu = kv_on_gpu

    def plan(self, plan: Plan) -> None:
        split_kv(plan, self.kv_on_gpu)
        plan.run_experts_on_host()
        keep_dense(plan)
        self.held = leave_on_host(plan)
        streamed = [] if plan.machine.unified else [page for page in plan.layout.pages if page.expert >= 0]
        self._stream(plan, streamed)

    async def decode(self, step: Step) -> None:
        order = [(i, j) for i in step.layers for j in step.micro_batches]
        ahead = len(step.micro_batches)
        for j in step.micro_batches:
            step.embed(j)
        routing = [self._launch(step, i, j) for i, j in order[:ahead]]
        for k, (i, j) in enumerate(order):
            routed = await routing[k]
            for expert in routed:
                step.run_expert(i, expert, j, at="host")
            if routed:
                step.load_routed(i, j)
            step.combine(i, j)
            if k + ahead < len(order):
                routing.append(self._launch(step, *order[k + ahead]))
        for j in step.micro_batches:
            step.sample(j)

    def _launch(self, step: Step, i: int, j: int) -> Task:
        """Submit the tasks of a layer and micro-batch that come before the experts; returns the router's task."""
        step.pre_attention(i, j)
        attend(step, i, j)
        routing = step.route(i, j)
        step.offload_routed(i, j)
        return routing

    def _goes_on(self, step: Step) -> bool:
        return False
