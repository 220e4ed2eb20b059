"""Record of prefetched experts, which are withdrawn if the router of their layer does not choose them."""

from __future__ import annotations

from collections import defaultdict

from moesched.dispatch.expert_placement import Expert, Routed
from moesched.dispatch.expert_pool import ExpertPool
from moesched.dispatch.pooled_experts import PooledExperts
from moesched.steps.step import Step


class Prefetches:
    """The experts that were prefetched before the router of their layer ran.

    to: the pool or cache to fetch experts to; None if all experts are kept, so that none is ever fetched.
    """

    def __init__(self, to: ExpertPool | PooledExperts | None) -> None:
        self._to = to
        self._coming: defaultdict[int, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(map(len, self._coming.values()))

    def __contains__(self, expert: Expert) -> bool:
        return expert[1] in self._coming[expert[0]]

    def fetch(self, step: Step, expert: Expert) -> None:
        """Fetch an expert at the lowest priority, page by page, unless it is in the pool or cache already."""
        if self._to is not None and expert not in self._to and self._to.prefetch(step, expert):
            self._coming[expert[0]].add(expert[1])

    def settle(self, step: Step, layer: int, routed: Routed) -> set[int]:
        """Withdraw the prefetched experts that a layer's router did not choose; return those that it chose.

        Fetch the returned experts again when they are needed: that makes their transfers urgent.

        routed: for each micro-batch, the number of its tokens that chose each expert.
        """
        coming = self._coming.pop(layer, set())
        right = {expert for expert in coming if any(expert in chosen for chosen in routed.values())}
        if self._to is not None:
            for expert in sorted(coming - right):
                self._to.withdraw(step, (layer, expert))
        return right
