"""The policies of successive batches: a new policy object for each, or one for all if the policy keeps state."""

from __future__ import annotations

from collections.abc import Callable

from moesched.seams import Policy, keeps_state


class BatchPolicies:
    """Makes the policy objects of successive batches, separately for each rank (accelerator or node).

    Args:
        make: creates a policy object.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._kept: dict[int, Policy] = {}

    def next_of(self, rank: int) -> Policy:
        """Return the policy object for a rank's next batch: a new one, or the earlier one if the policy keeps state."""
        policy = self._kept[rank] if rank in self._kept else self._make()
        if keeps_state(policy):
            self._kept[rank] = policy
        return policy
