"""FlexGen's schedule with attention on the GPU (ICML'23; the fourth schedule of MoE-Lightning's Fig. 6).

The KV cache lives on the host. While one micro-batch computes, the keys and values of the next one come to the GPU over
the link that the next layer's weights come by, as one transfer.
"""

from __future__ import annotations

from moesched.plan import Plan
from moesched.step import Step

from .placement import double_buffered


class FlexGen:
    """Zigzag block schedule: all micro-batches pass a layer before the next one; copies run one ahead."""

    def plan(self, plan: Plan) -> None:
        plan.discipline = "in_order"
        plan.limit_in_flight(2)
        plan.place_kv("host")
        plan.stage_kv(2)
        self.streamed, self.buffer = double_buffered(plan)

    async def prefill(self, step: Step) -> None:
        self._fetch(step, 0)
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            self._fetch(step, i + 1)
            for j in step.micro_batches:
                step.pre_attention(i, j)
                step.attention(i, j)
                step.offload_kv(i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    async def decode(self, step: Step) -> None:
        order = [(i, j) for i in step.layers for j in step.micro_batches]
        for j in step.micro_batches:
            step.embed(j)
        step.load_kv(*order[0])
        for (i, j), following in zip(order, [*order[1:], None], strict=True):
            if j == 0:
                self._fetch(step, i + 1)
            if following:
                step.load_kv(*following)
            step.pre_attention(i, j)
            step.attention(i, j)
            step.offload_kv(i, j)
            step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    def _fetch(self, step: Step, i: int) -> None:
        """All that streams of a layer, as one transfer; past the last layer, that of the next step's first."""
        if i == len(step.layers) and step.last:
            return
        pages = [page for page in self.streamed[i % len(step.layers)] if page not in self.buffer]
        if pages:
            step.fetch(pages, self.buffer)
