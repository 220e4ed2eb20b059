"""Three tiers: CGOPipe with weights that do not fit into host memory either, and come from the disk.

Both offloading papers keep all weights in host memory. Here host memory keeps the pages that fit beside the KV cache.
The others are read from the disk into the same pinned buffer, while earlier pages cross the link to the accelerator.
"""

from __future__ import annotations

from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .cgopipe import CGOPipe


class ThreeTiers(CGOPipe):
    """CGOPipe whose pages reach pinned memory from host memory or from the disk.

    Settings:
        ahead: number of micro-batches that CPU attention runs ahead of the accelerator.
        kv_on_gpu: share of the KV cache that stays on the GPU, which attends to that part (r_c).
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.held = plan.keep(self._held(plan), "host")

    def _held(self, plan: Plan) -> list[Page]:
        """The streamed pages that the host keeps: as many as fit, evenly from all layers."""
        if (
            plan.machine.unified
            or not plan.machine.roles.pinned
            or plan.machine.roles.weights == plan.memory("host").name
        ):
            return []
        left = plan.free("host")
        held = []
        for turn in range(max(map(len, self.streamed))):
            for pages in self.streamed:
                if turn < len(pages) and plan.slot_bytes(pages[turn]) <= left:
                    held.append(pages[turn])
                    left -= plan.slot_bytes(pages[turn])
        return held

    def _pin(self, step: Step, pages: list[Page]) -> None:
        device_kv = [page for page in pages if page in self.held]
        super()._pin(step, [page for page in pages if page not in device_kv])
        if device_kv and self.pinned:
            step.copy_to_pinned(device_kv, self.pinned, source=self.held)
