"""llama.cpp's -ngl: experts of the first layers run on the GPU, experts of the other layers usually on the CPU.

llama.cpp computes products of 32 tokens and more on the GPU, though their weights stay on the host: it copies the
chosen experts of each physical batch, after the router and before the products, so that copies and kernels take turns
(`offload_op` of ggml-cuda.cu, `compute_splits` of ggml-backend.cpp). A physical batch is a micro-batch here;
`--prefill-chunk 512` cuts prompts as llama.cpp's default does.

llama.cpp also computes the other layers' attention and projections on the CPU. Here attention and projections stay on
the GPU, which favours this policy: together they have a tenth of the weights that a token of Mixtral reads.
"""

from __future__ import annotations

from moesched.dispatch.expert_placement import keep_dense, keep_experts, leave_on_host
from moesched.dispatch.kv_placement import attend, place_kv_that_fits
from moesched.dispatch.setting_limits import require_at_least, require_at_most
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class LayerSplit:
    """Keeps the first layers' experts on the accelerator; others move only for large micro-batches.

    Settings:
        gpu_layers: the largest number of layers with their experts on the accelerator; by default as many as fit.
        copy_from: least number of tokens of a micro-batch for which the host's experts are copied to the accelerator
            and run there, if there is room for one expert; 0 for never.
    """

    def __init__(self, gpu_layers: int = -1, copy_from: int = 32) -> None:
        require_at_least(-1, gpu_layers=gpu_layers)
        require_at_least(0, copy_from=copy_from)
        self.gpu_layers = gpu_layers
        self.copy_from = copy_from

    def plan(self, plan: Plan) -> None:
        config = plan.layout.config
        require_at_most(
            config.layers, f"{config.name} has {config.layers} layers", gpu_layers=self.gpu_layers
        )
        plan.limit_in_flight(2)
        place_kv_that_fits(plan, experts=0)
        plan.run_experts_on_host()
        keep_dense(plan)
        copies = self.copy_from > 0 and not plan.machine.unified
        fit = _layers_that_fit(plan, beside=0)
        if copies and fit < len(plan.layers):
            fit = _layers_that_fit(plan, beside=_expert_bytes(plan))
        self.whole = range(fit if self.gpu_layers < 0 else min(fit, self.gpu_layers))
        whole = [(i, e) for i in self.whole for e in plan.layout.experts_of(i)]
        self.held = leave_on_host(plan, keep_experts(plan, whole))
        self.at_once = 0
        pages = [page for page in plan.layout.pages if page.expert >= 0 and page.layer not in self.whole]
        if copies and pages:
            experts = plan.layout.config.routed.experts
            self.at_once = min(experts, plan.free("accelerator") // _expert_bytes(plan))
        if self.at_once:
            slots = self.at_once * len(plan.layout.an_expert)
            self.copies = plan.pool("accelerator", "copies", slots, pages)

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attend(step, i, j)
                if i in self.whole:
                    step.post_attention(i, j)
                elif self.at_once and step.tokens(j) >= self.copy_from:
                    await self._copied(step, i, j)
                else:
                    await self._on_host(step, i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    async def _copied(self, step: Step, i: int, j: int) -> None:
        """Copy a layer's chosen experts to the accelerator and run them, as many at a time as there is room for."""
        chosen = list(await step.route(i, j))
        for first in range(0, len(chosen), self.at_once):
            experts = chosen[first : first + self.at_once]
            pages = [page for expert in experts for page in step.expert_pages(i, expert)]
            step.fetch(pages, self.copies, source=self.held)
            for expert in experts:
                step.run_expert(i, expert, j)
            step.evict(pages, self.copies)
        step.combine(i, j)

    async def _on_host(self, step: Step, i: int, j: int) -> None:
        routing = step.route(i, j)
        step.offload_routed(i, j)
        routed = await routing
        for expert in routed:
            step.run_expert(i, expert, j, at="host")
        if routed:
            step.load_routed(i, j)
        step.combine(i, j)


def _layers_that_fit(plan: Plan, beside: int) -> int:
    """Return the number of first layers whose experts fit into the accelerator's memory beside `beside` bytes."""
    left, fit = plan.free("accelerator") - beside, 0
    for i in plan.layers:
        left -= sum(plan.slot_bytes(page) for page in plan.layout.layer(i) if page.expert >= 0)
        fit += left >= 0
    return fit


def _expert_bytes(plan: Plan) -> int:
    return len(plan.layout.an_expert) * max(map(plan.slot_bytes, plan.layout.an_expert), default=0)
