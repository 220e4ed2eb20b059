"""Three tiers: CGOPipe with weights that do not fit into host memory either, and come from the disk.

MoE-Lightning and Fiddler keep all weights in host memory. Here, host memory has only pages that fit beside the KV
cache. The other pages are read from the disk into a buffer of the host, while earlier ones cross to the accelerator.
"""

from __future__ import annotations

from moesched.models.layout import Page
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.step import Step

from .cgopipe import CGOPipe


class ThreeTiers(CGOPipe):
    """CGOPipe with pages that come from host memory or from the disk.

    Settings:
        ahead: number of micro-batches that CPU attention runs ahead of the accelerator.
        kv_on_gpu: share (0 to 1) of the KV cache on the GPU, where attention to this share runs (r_c in MoE-Lightning).
    """

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.held = plan.keep(self._held(plan), "host")
        self.direct = plan.machine.page_locked
        from_disk = sum(len(self._by_tier(pages)[1]) for pages in self.streamed)
        self.all_staged = self.direct and self.staging is not None and from_disk <= len(self.staging.slots)

    def _staging(self, plan: Plan) -> Pool | None:
        """Make the pool through which pages from the disk pass to the accelerator.

        If all host memory is page-locked and weights come from the disk, the pool is in host memory, with room for a
        layer. Otherwise it is in pinned memory; None if the machine does not limit pinned memory.
        """
        if not plan.machine.page_locked or plan.machine.weights_on_host:
            return super()._staging(plan)
        pages = [page for layer in self.streamed for page in layer]
        return plan.pool("host", "from disk", max(map(len, self.streamed)), pages)

    def _held(self, plan: Plan) -> list[Page]:
        """Return the streamed pages that the host keeps: as many as fit, evenly from all layers."""
        if plan.machine.unified or plan.machine.weights_on_host:
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
        _, staged = self._by_tier(pages) if self.direct else ([], pages)
        super()._pin(step, staged)

    def _copy(self, step: Step, pages: list[Page], staging: Pool) -> None:
        held, from_disk = self._by_tier(pages)
        if self.all_staged:  # each page stays in its slot from step to step
            from_disk = [page for page in from_disk if page not in staging]
        if from_disk:
            super()._copy(step, from_disk, staging)
        if held:
            step.copy_to_pinned(held, staging, source=self.held)

    def _fetch(self, step: Step, pages: list[Page]) -> None:
        held, staged = self._by_tier(pages) if self.direct else ([], pages)
        super()._fetch(step, staged)
        if held:
            step.fetch(held, self.buffer, source=self.held)

    def _by_tier(self, pages: list[Page]) -> tuple[list[Page], list[Page]]:
        """Divide pages into those that the host keeps and those that come from the disk."""
        return [page for page in pages if page in self.held], [
            page for page in pages if page not in self.held
        ]
