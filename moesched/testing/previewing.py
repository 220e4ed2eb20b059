"""A policy that asks for every preview, and keeps it beside what the router then chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesched.steps.plan import Plan
from moesched.steps.step import Step


class Previewing:
    """Keeps all weights, and previews every later layer in each layer.

    Args:
        scores: whether it requests router scores.
        farthest: most layers ahead that it previews.

    Attributes:
        micro_batches: the requests of each micro-batch.
        seen: the values of `route` and of previews, by (step, layer, micro-batch, layers ahead); `route` is 0 ahead.
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
        """Values of `route`, by (step, layer, micro-batch)."""
        return self.foretold(0)

    def foretold(self, ahead: int) -> dict[tuple[int, int, int], Mapping[int, int]]:
        """Values of previews from that far ahead, likewise."""
        return {(s, i, j): value for (s, i, j, far), value in self.seen.items() if far == ahead}
