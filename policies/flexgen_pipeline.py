"""FlexGen over several GPUs by pipeline parallelism (ICML'23), which does not scale (MoE-Lightning, section 5.3).

Each GPU is a stage that holds a range of layers. The batch is cut into as many groups of micro-batches as there are
stages. A stage runs a group layer by layer, as in `flexgen`, while the next stage runs the previous group. A stage
thus fetches its streamed weights again for every group: with twice the GPUs, a stage has half the layers, but fetches
each layer twice as often.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from moesched.dispatch.kv_placement import attend_on_accelerator
from moesched.dispatch.resident_pages import double_buffered
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class FlexGenPipeline:
    """Passes group after group through double-buffered stages; on a single GPU, it is FlexGen."""

    pipelines = True

    def plan(self, plan: Plan) -> None:
        plan.discipline = "in_order"
        plan.place_kv("host")
        plan.reserve_kv_buffers(2)
        self.stages = plan.stages
        self.following: dict[int, int] = {}
        self.weights = {}
        for number, layers in enumerate(plan.stages):
            streamed, buffer = double_buffered(plan, number)
            for i, after, pages in zip(layers, [*layers[1:], layers[0]], streamed, strict=True):
                self.following[i] = after
                self.weights[i] = pages, buffer

    async def prefill(self, step: Step) -> None:
        for layers in self.stages:
            self._fetch(step, layers[0])
        self._schedule(step)

    async def decode(self, step: Step) -> None:
        self._schedule(step)

    def _schedule(self, step: Step) -> None:
        count, all_of_them = len(self.stages), step.micro_batches
        cuts = [group * len(all_of_them) // count for group in range(count + 1)]
        groups = [all_of_them[start:end] for start, end in pairwise(cuts) if start < end]
        for group in groups:
            self._pass(step, group, last=step.last and group is groups[-1])

    def _pass(self, step: Step, group: Sequence[int], *, last: bool) -> None:
        """Run one group of micro-batches through all layers.

        Args:
            last: whether this is the run's last group, after which a stage's first layer is not fetched again.
        """
        order = [(i, j) for i in step.layers for j in group]
        loads = order if step.kind == "decode" else []
        for j in group:
            step.embed(j)
        for load in loads[:1]:
            step.load_kv(*load)
        for number, (i, j) in enumerate(order, 1):
            if j == group[0] and (self.following[i] > i or not last):
                self._fetch(step, self.following[i])
            for load in loads[number : number + 1]:
                step.load_kv(*load)
            step.pre_attention(i, j)
            attend_on_accelerator(step, i, j)
            step.post_attention(i, j)
        for j in group:
            step.sample(j)

    def _fetch(self, step: Step, i: int) -> None:
        """Fetch a layer's streamed pages to its stage as one transfer."""
        streamed, buffer = self.weights[i]
        pages = [page for page in streamed if page not in buffer]
        if pages:
            step.fetch(pages, buffer)
