"""FlexGen's schedule with attention on the CPU (ICML'23; the third schedule of MoE-Lightning's Fig. 6).

Keys and values stay on the host. In decode only weights are fetched ahead: a micro-batch goes to the CPU for attention
and returns before the next micro-batch begins. Its hidden states wait on the link behind the next layer's weights.
"""

from __future__ import annotations

from moesched.dispatch.kv_placement import attend
from moesched.dispatch.resident_pages import double_buffered
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .flexgen import FlexGen


class FlexGenCPU(FlexGen):
    """FlexGen(c): one micro-batch at a time passes through a layer: on the GPU, the CPU and the GPU again."""

    def __init__(self) -> None:
        super().__init__(kv_on_gpu=0.0)

    def plan(self, plan: Plan) -> None:
        plan.discipline = "in_order"
        plan.limit_in_flight(2)
        plan.place_kv("host")
        self.streamed, self.buffer = double_buffered(plan)

    async def decode(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            self._fetch(step, i + 1)
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attend(step, i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)
