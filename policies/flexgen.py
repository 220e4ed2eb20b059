"""FlexGen's schedule with attention on the GPU (ICML'23; the fourth schedule of MoE-Lightning's Fig. 6).

If the KV cache is on the host, a micro-batch's keys and values are copied to the GPU while the previous micro-batch
computes. The copies share the link with the next layer's weights, which are one transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from moesched.dispatch.kv_placement import attend_on_accelerator, split_kv
from moesched.dispatch.resident_pages import double_buffered
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class FlexGen:
    """Zigzag blocks: all micro-batches pass a layer before the next; copies run one micro-batch ahead.

    Settings:
        kv_on_gpu: share (0 to 1) of the KV cache that stays on the GPU (r_c in MoE-Lightning).
    """

    def __init__(self, kv_on_gpu: float = 0.0) -> None:
        self.kv_on_gpu = kv_on_gpu

    def plan(self, plan: Plan) -> None:
        plan.discipline = "in_order"
        plan.limit_in_flight(2)
        split_kv(plan, self.kv_on_gpu)
        plan.reserve_kv_buffers(2)
        self.streamed, self.buffer = double_buffered(plan)

    async def prefill(self, step: Step) -> None:
        self._fetch(step, 0)
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            self._fetch(step, i + 1)
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attend_on_accelerator(step, i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    async def decode(self, step: Step) -> None:
        order = [(i, j) for i in step.layers for j in step.micro_batches]
        for j in step.micro_batches:
            step.embed(j)
        loads = ((i, j) for i, j in order if not step.kv_on_accelerator(j, i))
        self._load(step, loads)
        for i, j in order:
            if j == step.micro_batches[0]:
                self._fetch(step, i + 1)
            if not step.kv_on_accelerator(j, i):
                self._load(step, loads)
            step.pre_attention(i, j)
            attend_on_accelerator(step, i, j)
            step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    def _load(self, step: Step, loads: Iterator[tuple[int, int]]) -> None:
        """Load the keys and values of the next pair (layer, micro-batch) in `loads` from the host, if there is one."""
        for load in islice(loads, 1):
            step.load_kv(*load)

    def _fetch(self, step: Step, i: int) -> None:
        """Fetch a layer's streamed pages as one transfer; the layer after the last is the next step's first one."""
        if i == len(step.layers) and step.last:
            return
        pages = [page for page in self.streamed[i % len(step.layers)] if page not in self.buffer]
        if pages:
            step.fetch(pages, self.buffer)
