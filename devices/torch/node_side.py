"""The computations around exchanges between nodes: sums over a node's experts, and rows routed by another node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..kernels import expert_functions
from ..kernels.seam import RouterOutput
from ..products.linear import Tensor
from ..products.team import use_cores
from ..runner.micro_batch import MicroBatchState
from ..runner.moe_layer import MoELayer
from ..shared.node_exchanges import FIRST
from .compute import Compute

if TYPE_CHECKING:
    from moesched.seams import Array


class NodeSide:
    """Runs the computations that exist only where several nodes (machines) share a model's experts.

    Args:
        moe: runs the router.
        project_output: a function that projects attention's output for a task, before the layer's norm and router run.
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
        self._config = plan.layout.config
        self._states = states
        self._moe = moe
        self._accelerator = compute.accelerator
        self._dtype = compute.dtype
        self._project_output = project_output

    def partial_sum(self, task: Task) -> Tensor:
        """Return the weighted sum of the outputs of this node's own experts, on the accelerator.

        The result is a float32 tensor (tokens, hidden size). The first node also adds the outputs of the shared expert,
        if the layer has one.
        """
        use_cores(1)
        state = self._states[task.micro_batch]
        for expert, node in task.operands.items():
            if node != self._node:
                span = state.rows.of(expert)
                state.rows.y_nD[span.start : span.stop] = 0
        outputs = state.rows.outputs(shared=self._node == FIRST)
        total_TD = expert_functions.sum_experts(*outputs)
        del state.rows
        return total_TD

    def on_host(self, tensor: Tensor) -> Array:
        """Copy a tensor to the host's memory."""
        array: Array = tensor.cpu().numpy()
        return array

    def combine(self, task: Task, total_TD: Array) -> None:
        """Set a micro-batch's hidden states to the sum over all nodes plus the residual, rounded to `compute.dtype`.

        total_TD: the sum of all nodes' partial sums, float32, on the host.
        """
        state = self._states[task.micro_batch]
        state.hidden_TD = self._on_device(total_TD).add_(state.hidden_TD).to(self._dtype)

    def route(self, task: Task) -> tuple[dict[int, int], Array]:
        """Run the output projection and the router, and the shared expert if the layer has one.

        Returns:
            the number of rows of each expert that has any, and the router's result for `take_rows` on the other nodes.
            The latter is a float32 array (tokens, hidden size + 2 k) on the host. It has for each token, side by side,
            the experts' input, the numbers of the token's k experts, and their weights.
        """
        self._project_output(task)
        routed = self._moe.route(task)
        parts = (routed.x_TD, routed.experts_Tk, routed.weights_Tk)
        routed_TX = self.on_host(torch.cat([each.float() for each in parts], dim=-1))
        counts = self._moe.group(task, routed)
        self._moe.run_shared(task)
        return counts, routed_TX

    def take_rows(self, task: Task, routed_TX: Array) -> dict[int, int]:
        """Use the first node's router result on this node; returns the number of rows of each expert that has any.

        routed_TX: the second value that `route` returned on the first node.
        """
        top_k = self._config.layer(task.layer).feed_forward.top_k
        sizes = self._config.hidden, top_k, top_k
        x_TD, experts_Tk, weights_Tk = self._on_device(routed_TX).split(sizes, dim=-1)
        routed = RouterOutput(x_TD.to(self._dtype), experts_Tk.long(), weights_Tk)
        return self._moe.group(task, routed, reports=False)

    def _on_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._accelerator)
