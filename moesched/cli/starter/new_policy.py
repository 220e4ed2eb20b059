"""NewPolicy: weights stream layer by layer, ahead of the layer that computes.

moesched simulate --model mixtral-8x7b --machine t4 --workload mtbench --policy new_policy.py:NewPolicy
pytest test_new_policy.py
"""

from __future__ import annotations

from moesched import Plan, Step


class NewPolicy:
    """Fetch layers ahead of time into a buffer, and compute everything on the accelerator.

    Settings, which `--set ahead=2` changes:
        ahead: number of layers to fetch ahead of the layer that computes.
    """

    def __init__(self, ahead: int = 1) -> None:
        self.ahead = ahead

    def plan(self, plan: Plan) -> None:
        # Declare, once for each batch, what lies in which memory. `plan` tells of the model, the machine and the batch.
        plan.place_kv("accelerator")
        pages_of_a_layer = max(len(plan.layout.layer(i)) for i in plan.layers)
        # A pool replaces its oldest page when it is full: here, those of the layer that was computed last.
        slots = (self.ahead + 1) * pages_of_a_layer
        self.buffer = plan.pool("accelerator", "layers", slots, plan.layout.pages)

    async def prefill(self, step: Step) -> None:
        # The first step: the prompts. This policy treats it as any other.
        await self.decode(step)

    async def decode(self, step: Step) -> None:
        # Submit the tasks of one step. Verbs return at once: tasks run as soon as their data and their lane are free.
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for k in range(i, i + self.ahead + 1):
                self.fetch(step, k)
            for j in step.micro_batches:
                step.pre_attention(i, j)
                step.attention(i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    def fetch(self, step: Step, i: int) -> None:
        """Fetch the pages of layer `i` that the buffer lacks; an `i` past the last layer is one of the next step."""
        if i >= len(step.layers) and step.last:
            return
        missing = [page for page in step.pages(i % len(step.layers)) if page not in self.buffer]
        if missing:
            step.fetch(missing, self.buffer)
