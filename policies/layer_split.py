"""llama.cpp's -ngl: the experts of the first layers run on the GPU, those of the others on the CPU, for any input.

llama.cpp also computes the other layers' attention and projections on the CPU. Here these stay on the GPU, which
favours it: they are a tenth of the weights that a token of Mixtral reads.
"""

from __future__ import annotations

from moesched.dispatch.expert_placement import keep_dense, keep_experts, leave_on_host
from moesched.dispatch.kv_placement import attend, place_kv_that_fits
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class LayerSplit:
    """A fixed split between layers; no weights move after loading.

    Settings:
        gpu_layers: most layers with their experts on the accelerator; by default as many as fit.
    """

    def __init__(self, gpu_layers: int = -1) -> None:
        self.gpu_layers = gpu_layers

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(2)
        place_kv_that_fits(plan, experts=0)
        plan.run_experts_on_host()
        keep_dense(plan)
        layout, left = plan.layout, plan.free("accelerator")
        fit = 0
        for i in plan.layers:
            left -= sum(plan.slot_bytes(page) for page in layout.layer(i) if page.expert >= 0)
            fit += left >= 0
        self.whole = range(fit if self.gpu_layers < 0 else min(fit, self.gpu_layers))
        leave_on_host(plan, keep_experts(plan, [(i, e) for i in self.whole for e in layout.experts_of(i)]))

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attend(step, i, j)
                if i in self.whole:
                    step.post_attention(i, j)
                else:
                    await self._on_host(step, i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    async def _on_host(self, step: Step, i: int, j: int) -> None:
        routing = step.route(i, j)
        step.offload_routed(i, j)
        routed = await routing
        for expert in routed:
            step.run_expert(i, expert, j, at="host")
        if routed:
            step.load_routed(i, j)
        step.combine(i, j)
