"""Whole experts in a pool of fast memory: what policies that cache them share. What every token needs stays there."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.memory import Fixed
from moesched.plan import Plan
from moesched.step import Step

from .expert_placement import Expert, leave_on_host


def experts_that_fit(plan: Plan) -> int:
    """For how many experts the accelerator's memory has room, in slots of one size."""
    return plan.free("accelerator") // _slots_bytes(plan)


def all_fit(plan: Plan) -> bool:
    """Whether the accelerator's memory has room for all experts, if they are to stay."""
    experts = (page for page in plan.layout.pages if page.expert >= 0)
    return sum(map(plan.slot_bytes, experts)) <= plan.free("accelerator")


class ExpertPool:
    """Slots for so many experts; nothing is given up but by `evict`.

    Args:
        room: how many experts.
        filled: those that are there before the first step.
    """

    def __init__(self, plan: Plan, room: int, filled: Iterable[Expert] = ()) -> None:
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        slots = room * len(plan.layout.expert(0, 0))
        self._pool = plan.pool("accelerator", "experts", slots, experts, "none")
        self._source = _held_by_host(plan)
        plan.fill(self._pool, [page for expert in filled for page in plan.layout.expert(*expert)])

    def fetch(self, step: Step, expert: Expert) -> None:
        """Bring in an expert that is needed now."""
        step.fetch(step.expert_pages(*expert), self._pool, source=self._source, urgent=True)

    def evict(self, step: Step, expert: Expert) -> None:
        """Give an expert up."""
        step.evict(step.expert_pages(*expert), self._pool)


def _slots_bytes(plan: Plan) -> int:
    """Bytes of the slots for one expert."""
    pages = plan.layout.expert(0, 0)
    return len(pages) * max(plan.slot_bytes(page) for page in plan.layout.pages if page.expert >= 0)


def _held_by_host(plan: Plan) -> Fixed | None:
    """All experts in the host's memory, where they do not come from there anyhow and it has room for them."""
    nbytes = sum(plan.slot_bytes(page) for page in plan.layout.pages if page.expert >= 0)
    if plan.machine.unified or plan.weights_on_host or nbytes > plan.free("host"):
        return None
    return leave_on_host(plan)
