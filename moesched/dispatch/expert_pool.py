"""A pool of whole experts in fast memory, for policies that cache experts."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.dispatch.expert_placement import Expert, leave_on_host
from moesched.steps.plan import Plan
from moesched.steps.step import Step


def experts_that_fit(plan: Plan) -> int:
    """Return the number of experts that fit in the accelerator's free memory, in slots of equal size."""
    return plan.free("accelerator") // _slots_bytes(plan)


def all_fit(plan: Plan) -> bool:
    """Test whether all experts fit in the free memory of the accelerator."""
    experts = (page for page in plan.layout.pages if page.expert >= 0)
    return sum(map(plan.slot_bytes, experts)) <= plan.free("accelerator")


def host_has_experts(plan: Plan) -> bool:
    """Test whether all experts are in host memory or fit there; False if host and accelerator share a memory."""
    if plan.machine.unified or plan.machine.weights_on_host:
        return not plan.machine.unified
    return sum(plan.slot_bytes(page) for page in plan.layout.pages if page.expert >= 0) <= plan.free("host")


class ExpertPool:
    """A pool of slots for whole experts in the accelerator's memory; only `evict` and `withdraw` free slots.

    Args:
        plan: the plan in which the pool is declared.
        room: number of experts that the pool has slots for.
        filled: experts that are in the pool before the first step.
        on_host: whether to keep all experts in host memory and fetch them from there.
    """

    def __init__(self, plan: Plan, room: int, filled: Iterable[Expert], *, on_host: bool) -> None:
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        slots = room * len(plan.layout.an_expert)
        first = [page for expert in filled for page in plan.layout.expert(*expert)]
        self._pool = plan.pool("accelerator", "experts", slots, experts, "none", first)
        self._source = leave_on_host(plan) if on_host else None
        layout = plan.layout
        self._pages = {
            (i, expert): layout.expert(i, expert) for i in plan.layers for expert in layout.experts_of(i)
        }

    def __contains__(self, expert: Expert) -> bool:
        return self._pages[expert][0] in self._pool

    def arrived(self, step: Step, expert: Expert) -> bool:
        """Test whether all pages of an expert are in the pool now (see `Step.arrived`)."""
        return all(map(step.arrived, self._pages[expert]))

    def fetch(self, step: Step, expert: Expert) -> None:
        """Fetch an expert that is needed now; if the expert is already being prefetched, make its transfers urgent."""
        if expert in self:
            step.promote(self._pages[expert], self._pool)
        else:
            step.fetch(self._pages[expert], self._pool, source=self._source, urgent=True)

    def prefetch(self, step: Step, expert: Expert) -> bool:
        """Prefetch an expert, page by page, at the lowest priority; return True, as this pool refuses no expert."""
        for page in self._pages[expert]:
            step.fetch([page], self._pool, source=self._source, speculative=True)
        return True

    def withdraw(self, step: Step, expert: Expert) -> None:
        """Drop a prefetched expert: cancel the pages whose transfer has not started, and evict the others."""
        for page in self._pages[expert]:
            if not step.cancel([page], self._pool):
                step.evict([page], self._pool)

    def evict(self, step: Step, expert: Expert) -> None:
        """Evict an expert's pages, so that their slots are free."""
        step.evict(self._pages[expert], self._pool)


def _slots_bytes(plan: Plan) -> int:
    """Return the bytes of the slots for one expert.

    There is a slot for each page of the expert with the most pages, and all slots have the size of the largest page.
    """
    return len(plan.layout.an_expert) * max(
        plan.slot_bytes(page) for page in plan.layout.pages if page.expert >= 0
    )
