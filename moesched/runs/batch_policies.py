"""The policies of successive batches: a new policy object for each, or one for all if the policy keeps state."""

from __future__ import annotations

from collections.abc import Callable

from moesched.seams import Policy, keeps_state


class BatchPolicies:
    """Makes the policies of a run's batches, one for each rank or node.

    Args:
        make: creates a policy object.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._kept: dict[int, Policy] = {}

    def next_of(self, rank: int) -> Policy:
        """Return the policy object for the next batch of a rank or node."""
        policy = self._kept[rank] if rank in self._kept else self._make()
        if keeps_state(policy):
            self._kept[rank] = policy
        return policy
