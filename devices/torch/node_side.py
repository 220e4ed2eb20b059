"""The computations around exchanges between nodes: sums of the node's own experts, rows that the first node routed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..kernels import expert_functions
from ..kernels.seam import Routed
from ..products.linear import Tensor
from ..products.team import use_cores
from ..runner.micro_batch import MicroBatchState
from ..runner.moe_layer import MoELayer
from .compute import Compute

if TYPE_CHECKING:
    from moesched.seams import Array


class NodeSide:
    """Runs the computations that exist only where several nodes share a model's experts.

    Args:
        project_output: runs the output projection, before a layer's norm and router.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[MicroBatchState],
        moe: MoELayer,
        compute: Compute,
        project_output: Callable[[Task], None],
    ) -> None:
        self._node = plan.nodes.index
        self._top_k = plan.layout.config.routed.top_k
        self._states = states
        self._moe = moe
        self._accelerator = compute.accelerator
        self._dtype = compute.dtype
        self._project_output = project_output

    def partial_sum(self, task: Task) -> Tensor:
        """The weighted sum (T, D), float32, of the outputs of this node's own experts, on the accelerator."""
        use_cores(1)
        state = self._states[task.micro_batch]
        for expert, node in task.operands.items():
            if node != self._node:
                span = state.rows.of(expert)
                state.rows.y_nD[span.start : span.stop] = 0
        total_TD = expert_functions.sum_experts(*state.rows.outputs())
        del state.rows
        return total_TD

    def on_host(self, tensor: Tensor) -> Array:
        """Copy a tensor to the host's memory."""
        array: Array = tensor.cpu().numpy()
        return array

    def combine(self, task: Task, total_TD: Array) -> None:
        """Add the residual to the sum (T, D) over all nodes, and round once, as a single machine does."""
        state = self._states[task.micro_batch]
        state.hidden_TD = self._on_device(total_TD).add_(state.hidden_TD).to(self._dtype)

    def route(self, task: Task) -> tuple[dict[int, int], Array]:
        """Run the router; returns the number of rows of each expert that has any, and its result for `take_rows`.

        The result is float32 (T, D + 2 k) on the host: the experts' input, each token's experts and their weights.
        """
        self._project_output(task)
        routed = self._moe.route(task)
        parts = (routed.x_TD, routed.experts_Tk, routed.weights_Tk)
        routed_TX = self.on_host(torch.cat([each.float() for each in parts], dim=-1))
        return self._moe.group(task, routed), routed_TX

    def take_rows(self, task: Task, routed_TX: Array) -> dict[int, int]:
        """Take over the first node's result of `route`; returns the number of rows of each expert that has any."""
        ends = (-2 * self._top_k, -self._top_k)
        x_TD, experts_Tk, weights_Tk = self._on_device(routed_TX).tensor_split(ends, dim=-1)
        routed = Routed(x_TD.to(self._dtype), experts_Tk.long(), weights_Tk)
        return self._moe.group(task, routed, reports=False)

    def _on_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._accelerator)
