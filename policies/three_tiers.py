"""Three tiers at once: CGOPipe with weights that do not even fit host memory, and come from the disk.

Both offloading papers keep all weights in host memory. Here it keeps what it can hold beside the KV cache; the other
pages are read from the disk into the same pinned buffer, while those before them cross the link to the accelerator.
"""

from __future__ import annotations

from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .cgopipe import CGOPipe


class ThreeTiers(CGOPipe):
    """CGOPipe whose pages come to pinned memory from the host where it has them, else from the disk.

    Settings:
        ahead: how many micro-batches CPU attention runs ahead of the accelerator.
        kv_on_gpu: the share of the micro-batches whose KV cache stays on the GPU, which attends to those (r_c).
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.held = plan.keep(self._held(plan), "host")

    def _held(self, plan: Plan) -> list[Page]:
        """Of the pages that stream, as many as the host can hold, of every layer as many as of the others."""
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
