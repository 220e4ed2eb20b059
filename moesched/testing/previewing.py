"""A test policy that requests every preview, and records the previews and the routers' later choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesched.steps.plan import Plan
from moesched.steps.step import Step


class Previewing:
    """Keeps all weights on the accelerator; in each layer, previews the routers of the later layers.

    Args:
        scores: whether to request router scores.
        farthest: the largest number of layers to look ahead.

    Attributes:
        micro_batches: the requests of each micro-batch.
        seen: the values of `route` and `preview_route` (number of rows by expert), by (step, layer of the router,
            micro-batch, layers ahead); values of `route` are 0 layers ahead.
    """

    def __init__(self, *, scores: bool = False, farthest: int = 99) -> None:
        self._scores = scores
        self._farthest = farthest
        self.seen: dict[tuple[int, int, int, int], Any] = {}

    def plan(self, plan: Plan) -> None:
        """Keep all weights and the KV cache on the accelerator."""
        self.micro_batches = plan.batch.micro_batches
        plan.place_kv("accelerator")
        plan.keep(plan.layout.pages)
        if self._scores:
            plan.request_scores()

    async def prefill(self, step: Step) -> None:
        """Run micro-batch by micro-batch, and await every router and preview."""
        for j in step.micro_batches:
            step.embed(j)
            for i in step.layers:
                step.pre_attention(i, j)
                step.attention(i, j)
                routed = self.seen[step.index, i, j, 0] = await step.route(i, j)
                for later in step.layers[i + 1 : i + 1 + self._farthest]:
                    self.seen[step.index, later, j, later - i] = await step.preview_route(later, j)
                for expert in routed:
                    step.run_expert(i, expert, j)
                step.combine(i, j)
            step.sample(j)

    decode = prefill

    @property
    def chosen(self) -> dict[tuple[int, int, int], Mapping[int, int]]:
        """The values of `route` (number of rows by expert), by (step, layer, micro-batch)."""
        return self.foretold(0)

    def foretold(self, ahead: int) -> dict[tuple[int, int, int], Mapping[int, int]]:
        """Return the values of previews (number of rows by expert) from `ahead` layers before the router's layer.

        The keys are (step, layer of the router, micro-batch).
        """
        return {(s, i, j): value for (s, i, j, far), value in self.seen.items() if far == ahead}
