"""The computations on MLX around exchanges between nodes: sums over a node's experts, and rows routed by another node.

Exchanges take and return numpy arrays, on any thread. The task before an exchange converts MLX arrays to numpy arrays,
and the task after it converts them back, both on the device's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..kernels import mlx_elements
from ..kernels import mlx_functions as functions
from ..kernels.seam import RouterOutput
from ..runner.micro_batch import MicroBatchState
from ..runner.moe_layer import MoELayer
from .evaluations import Evaluations
from .memory import ARRAY_DTYPES

if TYPE_CHECKING:
    from moesched.seams import Array


class MlxNodeSide:
    """Runs the computations that exist only where several nodes (machines) share a model's experts.

    Args:
        moe: runs the router.
        evaluations: evaluates the lazy arrays of results, during the task or after it.
        project_output: a function that projects attention's output for a task, before the layer's norm and router run.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[MicroBatchState],
        moe: MoELayer,
        evaluations: Evaluations,
        project_output: Callable[[Task], None],
    ) -> None:
        self._top_k = plan.layout.config.routed.top_k
        self._dtype = ARRAY_DTYPES[plan.layout.dtype]
        self._states = states
        self._moe = moe
        self._evaluations = evaluations
        self._project_output = project_output

    def partial_sum(self, task: Task) -> Array:
        """Return the weighted sum of the outputs of this node's own experts, in the host's memory.

        The result is a float32 array (tokens, hidden size).
        """
        state = self._states[task.micro_batch]
        total_TD = functions.sum_experts(*state.rows.outputs())
        del state.rows
        self._evaluations.settle(task.micro_batch, total_TD)
        return self._evaluations.on_host(total_TD)

    def on_host(self, tensor: Array) -> Array:
        """Return the array unchanged: it is in the host's memory."""
        return tensor

    def combine(self, task: Task, total_TD: Array) -> None:
        """Add the residual to the sum over all nodes, and round; the result becomes the micro-batch's hidden states.

        total_TD: the sum of all nodes' partial sums, float32, on the host.
        """
        state = self._states[task.micro_batch]
        state.hidden_TD = mlx_elements.added_to(state.hidden_TD, mx.array(total_TD))
        self._evaluations.later(task, state.hidden_TD)

    def route(self, task: Task) -> tuple[dict[int, int], Array]:
        """Project attention's output, run the router, and sort the rows by expert, for a task's micro-batch.

        Returns:
            the number of rows of each expert that has any, and the router's result for `take_rows` on the other nodes.
                The latter is a float32 array (tokens, hidden size + 2 k) on the host. It has for each token, side by
                side, the experts' input, the numbers of the token's k experts, and their weights.
        """
        self._project_output(task)
        routed = self._moe.route(task)
        parts = (routed.x_TD, routed.experts_Tk, routed.weights_Tk)
        routed_TX = mx.concatenate([each.astype(mx.float32) for each in parts], axis=-1)
        return self._moe.group(task, routed), np.array(routed_TX)

    def take_rows(self, task: Task, routed_TX: Array) -> dict[int, int]:
        """Sort rows by expert as the first node's router chose; returns the number of rows of each expert that has any.

        routed_TX: the second value that `route` returned on the first node.
        """
        width = routed_TX.shape[-1] - 2 * self._top_k
        x_TD, experts_Tk, weights_Tk = mx.split(mx.array(routed_TX), [width, width + self._top_k], axis=-1)
        routed = RouterOutput(x_TD.astype(self._dtype), experts_Tk.astype(mx.uint32), weights_Tk)
        return self._moe.group(task, routed, reports=False)
