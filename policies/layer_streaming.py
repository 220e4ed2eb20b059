"""Layer by layer: each layer's weights arrive in one transfer while the previous layer computes.

DeepSpeed ZeRO-Inference offloads like this: no weights stay, every layer is streamed, attention runs on the
accelerator, and all micro-batches use a layer before it is evicted.
"""

from __future__ import annotations

from moesched.steps.plan import Plan
from moesched.steps.step import Step


class LayerStreaming:
    """Streams every layer through a double buffer of whole layers in fast memory, filled one layer ahead."""

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(2)
        plan.place_kv("accelerator")
        largest = max(len(plan.layout.layer(i)) for i in plan.layers)
        self.buffer = plan.pool("accelerator", "layers", 2 * largest, plan.layout.pages)

    async def prefill(self, step: Step) -> None:
        self._fetch(step, 0)
        self._schedule(step)

    async def decode(self, step: Step) -> None:
        self._schedule(step)

    def _schedule(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            if i + 1 < len(step.layers) or not step.last:
                self._fetch(step, (i + 1) % len(step.layers))
            for j in step.micro_batches:
                step.pre_attention(i, j)
                step.attention(i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    def _fetch(self, step: Step, i: int) -> None:
        """Fetch a layer in one transfer, unless it is still in the buffer, as in a model of one or two layers."""
        if step.pages(i)[0] not in self.buffer:
            step.fetch(step.pages(i), self.buffer)
