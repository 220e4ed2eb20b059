"""CGOPipe: MoE-Lightning's CPU-GPU-I/O pipeline with paged weights (ASPLOS'25, Algorithm 1 and Appendix A.1).

Attention runs on the CPU two micro-batches ahead of the GPU. The next layer's weights arrive page by page between the
micro-batches' activations. If only a part of the host's memory can be page-locked, weights are first copied to that
part, called pinned memory, as in the paper.
"""

from __future__ import annotations

from moesched.dispatch.kv_placement import attend, split_kv
from moesched.dispatch.resident_pages import double_buffered
from moesched.dispatch.setting_limits import require_at_least
from moesched.models.layout import DENSE, Page
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class CGOPipe:
    """Streams weights through a double buffer of pages; pages that fit beside it stay in fast memory.

    The share of the pages that stay is r_w in the paper.

    Settings:
        ahead: number of micro-batches that CPU attention runs ahead of the accelerator; 2 in the paper.
        kv_on_gpu: share (0 to 1) of the KV cache on the GPU, where attention to this share runs (r_c in the paper).
    """

    def __init__(self, ahead: int = 2, kv_on_gpu: float = 0.0) -> None:
        require_at_least(1, ahead=ahead)
        self.ahead = ahead
        self.kv_on_gpu = kv_on_gpu

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(2)
        split_kv(plan, self.kv_on_gpu)
        self.streamed, self.buffer = double_buffered(plan)
        self.staging = self._staging(plan)
        self.waiting: list[Page] = []
        self.pinned: list[Page] = []
        self.shares: dict[int, tuple[list[Page], ...]] = {}

    def _staging(self, plan: Plan) -> Pool | None:
        """Make the pool of pinned memory, with as many slots as the buffer has, or as fit.

        Return None if the machine does not limit pinned memory.
        """
        if not plan.machine.roles.pinned:
            return None
        pages = [page for layer in self.streamed for page in layer]
        fit = plan.free("pinned") // max(map(plan.slot_bytes, pages), default=1)
        return plan.pool("pinned", "staging", max(1, min(len(self.buffer.slots), fit)), pages)

    async def prefill(self, step: Step) -> None:
        """Run all on the accelerator, layer by layer; new keys and values go to the host's KV cache (section 4)."""
        self._divide(step)
        first = [page for page in self.streamed[0] if page not in self.buffer]
        self._pin(step, first)
        self._fetch(step, first)
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                self._pin(step, self._page(step, i + 1, j))
                self._fetch(step, self._page(step, i + 1, j))
                step.pre_attention(i, j)
                attend(step, i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    async def decode(self, step: Step) -> None:
        """Run Algorithm 1: attention runs `ahead` micro-batches early, and pages arrive one layer early.

        Attention thus begins the next layer before this one has ended; pages are also fetched for the next step.
        """
        self._divide(step)
        order = [(i, j) for i in step.layers for j in step.micro_batches]
        ahead = min(self.ahead, len(step.micro_batches))
        for j in step.micro_batches:
            step.embed(j)
        for i, j in order[:ahead]:
            self._launch(step, i, j)
        for k, (i, j) in enumerate(order):
            if not step.kv_on_accelerator(j, i):
                step.load_hidden(i, j)
            self._fetch(step, self._page(step, i + 1, j))
            step.post_attention(i, j)
            if k + ahead < len(order):
                self._launch(step, *order[k + ahead])
        for j in step.micro_batches:
            step.sample(j)

    def _launch(self, step: Step, i: int, j: int) -> None:
        step.pre_attention(i, j)
        if step.kv_on_accelerator(j, i):
            step.attention(i, j)
        else:
            step.offload_qkv(i, j)
            step.cpu_attention(i, j)
        self._pin(step, self._page(step, i + 1, j))

    def _divide(self, step: Step) -> None:
        """Divide the pages of each layer among the step's micro-batches."""
        if tuple(self.shares) != step.micro_batches:
            by_layer = [shares(pages, len(step.micro_batches)) for pages in self.streamed]
            self.shares = dict(zip(step.micro_batches, zip(*by_layer, strict=True), strict=True))

    def _page(self, step: Step, i: int, j: int) -> list[Page]:
        """Return micro-batch j's share of layer i's pages; the layer after the last is the next step's first layer."""
        if i == len(step.layers) and step.last:
            return []
        return self.shares[j][i % len(step.layers)]

    def _pin(self, step: Step, pages: list[Page]) -> None:
        """Copy pages to pinned memory; pages that find no free slot wait until fetches have freed some."""
        if self.staging:
            self.waiting += pages
            self._fill(step, self.staging)

    def _fill(self, step: Step, staging: Pool) -> None:
        """Copy waiting pages, in order, to the free slots of pinned memory."""
        free = len(staging.slots) - len(self.pinned)
        pages, self.waiting = self.waiting[:free], self.waiting[free:]
        if pages:
            self._copy(step, pages, staging)
            self.pinned += pages

    def _copy(self, step: Step, pages: list[Page], staging: Pool) -> None:
        step.copy_to_pinned(pages, staging)

    def _fetch(self, step: Step, pages: list[Page]) -> None:
        """Fetch pages into the buffer; if there is a pool of pinned memory, from it, as many at a time as it holds."""
        while pages:
            ready = pages
            if self.staging:
                self._fill(step, self.staging)
                ready = self.pinned[: len(pages)]
                self.pinned = self.pinned[len(ready) :]
            step.fetch(ready, self.buffer, source=self.staging)
            pages = pages[len(ready) :]


def shares(pages: list[Page], count: int) -> list[list[Page]]:
    """Cut a layer's pages into `count` shares, one for each micro-batch.

    The first share has the whole dense part, which attention needs first, as it runs ahead.
    """
    dense = sum(page.expert == DENSE for page in pages)
    ends = [max(dense, len(pages) * share // count) for share in range(1, count + 1)]
    return [pages[start:end] for start, end in zip([0, *ends], ends, strict=False)]
