"""Expert by expert: weight pages stream through a ring of slots in the order of use; all other pages stay in memory.

A kernel that reads a whole layer needs a buffer of whole layers. A kernel that reads one expert needs only that expert.
The memory saved by the smaller buffer keeps weights, which are then not read again in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.dispatch.kv_placement import attend
from moesched.dispatch.resident_pages import keep_beside_buffer
from moesched.dispatch.setting_limits import require_at_least
from moesched.models.layout import Page
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class ExpertStreaming:
    """Moves a few experts in one transfer while the experts of the previous transfer compute.

    An expert is moved even if no token will be routed to it, since its transfer starts before the router has run.

    Settings:
        together: number of experts in one transfer.
        ahead: number of transfers that may be under way while the experts of an earlier transfer are in use.
    """

    def __init__(self, together: int = 2, ahead: int = 1) -> None:
        require_at_least(1, together=together)
        require_at_least(0, ahead=ahead)
        self.together = together
        self.ahead = ahead
        self.held: Pool | None = None

    def plan(self, plan: Plan) -> None:
        self._place_kv(plan)
        slots = self._slots(plan)
        streamed = keep_beside_buffer(plan, lambda pages: min(slots, pages * len(plan.layers)))
        self._stream(plan, [page for layer in streamed for page in layer])

    def _stream(self, plan: Plan, pages: Sequence[Page]) -> None:
        """Make the ring of slots on the accelerator, and the order in which these pages stream through it."""
        self.ring = plan.pool("accelerator", "ring", min(self._slots(plan), len(pages)), pages)
        self.experts = range(plan.layout.config.routed.experts)
        self.parts: dict[tuple[int, int], list[Page]] = {}
        for page in pages:
            self.parts.setdefault((page.layer, page.expert), []).append(page)
        self.order = list(self.parts.values())
        self.at_once = min(self.together, len(self.order))
        self.room = min(self.together * (1 + self.ahead), len(self.order))
        self.moved = self.used = 0

    async def prefill(self, step: Step) -> None:
        self._move(step)
        await self._schedule(step)

    async def decode(self, step: Step) -> None:
        await self._schedule(step)

    async def _schedule(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attend(step, i, j)
            routing = {j: step.route(i, j) for j in step.micro_batches}
            self._let_go(step, (i, -1))
            routed = {j: await handle for j, handle in routing.items()}
            for expert in self.experts:
                self.run_expert(step, i, expert, [j for j in step.micro_batches if expert in routed[j]])
                self._let_go(step, (i, expert))
            for j in step.micro_batches:
                step.combine(i, j)
        for j in step.micro_batches:
            step.sample(j)

    def _place_kv(self, plan: Plan) -> None:
        plan.place_kv("accelerator")

    def run_expert(self, step: Step, i: int, expert: int, users: Sequence[int]) -> None:
        """Run a layer's expert on the tokens of the micro-batches in `users`, which chose the expert."""
        for j in users:
            step.run_expert(i, expert, j)

    def _let_go(self, step: Step, part: tuple[int, int]) -> None:
        """Evict a part (layer, expert or -1 for dense pages) after its last use, and move the next parts there."""
        pages = self.parts.get(part)
        if pages is not None:
            step.evict(pages, self.ring)
            self.used += 1
            self._move(step)

    def _move(self, step: Step) -> None:
        """Start to move the next parts (experts, or dense pages of a layer) to the ring while it has room.

        After the last layer come parts of the next step.
        """
        order = self.order
        while order and (end := self.moved + self.at_once) <= self.used + self.room:
            if not self._goes_on(step):
                end = min(end, (step.index + 1) * len(order))
            pages = [page for number in range(self.moved, end) for page in order[number % len(order)]]
            if not pages:
                break
            step.fetch(pages, self.ring, source=self.held)
            self.moved = end

    def _slots(self, plan: Plan) -> int:
        dense = max(len(plan.layout.dense(i)) for i in plan.layers)
        largest = max(dense, len(plan.layout.an_expert))
        return (1 + self.ahead) * self.together * largest

    def _goes_on(self, step: Step) -> bool:
        """Return True if another step follows, so that the next step's parts may be moved already."""
        return not step.last
