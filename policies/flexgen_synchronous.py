"""FlexGen as its published code runs, with less overlap than its schedule has.

`generation_loop_overlap_multi_batch` of FlexGen's flex_opt.py launches the copies and kernels of one micro-batch in one
layer and then waits for all of them. A layer's weights thus overlap with one micro-batch instead of all. In addition,
its pytorch_backend.py does not pin the KV cache ("high memory overhead"): a copy from the cache goes through pinned
memory on the thread that launches kernels, and blocks this thread.
"""

from __future__ import annotations

from moesched.steps.step import Step

from .flexgen import FlexGen


class FlexGenSynchronous(FlexGen):
    """FlexGen with attention on the GPU, waiting at the end of every micro-batch of every layer."""

    def __init__(self) -> None:
        super().__init__(kv_on_gpu=0.0)

    async def decode(self, step: Step) -> None:
        order = [(i, j) for i in step.layers for j in step.micro_batches]
        for j in step.micro_batches:
            step.embed(j)
        step.load_kv(*order[0])
        for (i, j), following in zip(order, [*order[1:], None], strict=True):
            if following:
                await step.load_kv(*following)
            if j == step.micro_batches[0]:
                self._fetch(step, i + 1)
            step.pre_attention(i, j)
            step.attention(i, j)
            saved = step.offload_kv(i, j)
            await step.post_attention(i, j)
            await saved
        for j in step.micro_batches:
            step.sample(j)
