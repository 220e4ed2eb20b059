"""Seams of simulated runs: the choice of experts, and delays of lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moesched.tasks import Task


class Routing(Protocol):
    """Chooses experts where no router runs. `choose` depends only on its arguments and the routing's seed."""

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Count a micro-batch's tokens for each expert that gets any, in ascending order of expert.

        Args:
            step: 0 for the micro-batch's prompts, then 1, 2, ... for the tokens that follow them.
            layer: number of the layer.
            micro_batch: number of the micro-batch.
            tokens: number of the micro-batch's new tokens in the step.
        """


class Delay(Protocol):
    """Adds time to the tasks of one lane; for virtual clocks only.

    Unlike a cost model, a delay may keep state, so that the time it adds depends on the lane's earlier tasks. It is
    called once for every task that starts on the lane, in the order of the starts.
    """

    def __call__(self, task: Task, now: int) -> int:
        """Return the nanoseconds that a task starting now takes beyond the cost of its work."""
