"""FastDecode with offloaded weights (the second schedule of MoE-Lightning's Fig. 6).

CPU attention overlaps with the GPU as in CGOPipe, but a layer's weights are one transfer. Hidden states that are queued
behind this transfer wait for its end.
"""

from __future__ import annotations

from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .cgopipe import CGOPipe


class FastDecode(CGOPipe):
    """CGOPipe with each layer's weights in one transfer, and with the whole KV cache on the host.

    Settings:
        ahead: number of micro-batches that CPU attention runs ahead of the accelerator.
    """

    def __init__(self, ahead: int = 2) -> None:
        super().__init__(ahead, kv_on_gpu=0.0)

    def plan(self, plan: Plan) -> None:
        plan.discipline = "in_order"
        super().plan(plan)

    def _page(self, step: Step, i: int, j: int) -> list[Page]:
        """Return all streamed pages of layer i for the first micro-batch, and none for the others."""
        if j != step.micro_batches[0] or (i == len(step.layers) and step.last):
            return []
        return self.streamed[i % len(step.layers)]
