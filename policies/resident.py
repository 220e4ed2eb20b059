"""Keeps everything in fast memory: the reference for the offloading policies."""

from __future__ import annotations

from moesched.steps.plan import Plan
from moesched.steps.step import Step


class Resident:
    """Keeps all weights and the KV cache in the accelerator's memory."""

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(2)
        plan.place_kv("accelerator")
        plan.keep([page for layer in plan.layers for page in plan.layout.layer(layer)])

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
            for i in step.layers:
                step.pre_attention(i, j)
                step.attention(i, j)
                step.post_attention(i, j)
            step.sample(j)

    decode = prefill
