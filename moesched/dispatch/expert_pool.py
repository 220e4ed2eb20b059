"""Whole experts in a pool of fast memory: what policies that cache them share. What every token needs stays there."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.dispatch.expert_placement import Expert, leave_on_host
from moesched.steps.plan import Plan
from moesched.steps.step import Step


def experts_that_fit(plan: Plan) -> int:
    """For how many experts the accelerator's memory has room, in slots of one size."""
    return plan.free("accelerator") // _slots_bytes(plan)


def all_fit(plan: Plan) -> bool:
    """Whether the accelerator's memory has room for all experts, if they are to stay."""
    experts = (page for page in plan.layout.pages if page.expert >= 0)
    return sum(map(plan.slot_bytes, experts)) <= plan.free("accelerator")


def host_has_experts(plan: Plan) -> bool:
    """Whether a host with a memory of its own has all experts there, or room for them."""
    if plan.machine.unified or plan.machine.weights_on_host:
        return not plan.machine.unified
    return sum(plan.slot_bytes(page) for page in plan.layout.pages if page.expert >= 0) <= plan.free("host")


class ExpertPool:
    """Slots for so many experts; nothing is given up but by `evict`.

    Args:
        room: how many experts.
        filled: those that are there before the first step.
        on_host: whether the host has all of them, for them to come from there.
    """

    def __init__(self, plan: Plan, room: int, filled: Iterable[Expert], *, on_host: bool) -> None:
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        slots = room * len(plan.layout.expert(0, 0))
        first = [page for expert in filled for page in plan.layout.expert(*expert)]
        self._pool = plan.pool("accelerator", "experts", slots, experts, "none", first)
        self._source = leave_on_host(plan) if on_host else None
        layout = plan.layout
        self._pages = {
            (i, expert): layout.expert(i, expert)
            for i in plan.layers
            for expert in range(layout.config.experts)
        }

    def fetch(self, step: Step, expert: Expert) -> None:
        """Bring in an expert that is needed now."""
        step.fetch(self._pages[expert], self._pool, source=self._source, urgent=True)

    def prefetch(self, step: Step, expert: Expert) -> None:
        """Bring in an expert that may be needed, page by page, after all else that wants the link."""
        for page in self._pages[expert]:
            step.fetch([page], self._pool, source=self._source, speculative=True)

    def promote(self, step: Step, expert: Expert) -> None:
        """An expert that is coming is needed now."""
        step.promote(self._pages[expert], self._pool)

    def withdraw(self, step: Step, expert: Expert) -> None:
        """Give up an expert that was prefetched; those of its pages that are not on their way yet never come."""
        for page in self._pages[expert]:
            if not step.cancel([page], self._pool):
                step.evict([page], self._pool)

    def evict(self, step: Step, expert: Expert) -> None:
        """Give an expert up."""
        step.evict(self._pages[expert], self._pool)


def _slots_bytes(plan: Plan) -> int:
    """Bytes of the slots for one expert."""
    pages = plan.layout.expert(0, 0)
    return len(pages) * max(plan.slot_bytes(page) for page in plan.layout.pages if page.expert >= 0)
