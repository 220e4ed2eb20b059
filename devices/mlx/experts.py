"""Implements the runner's interface `Experts` on MLX: sorts rows by expert, and runs experts on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesched.models.config import ModelConfig
from moesched.steps.views import View
from moesched.tasks import Task

from ..kernels import mlx_functions as functions
from ..kernels.binder import Binder
from ..kernels.mlx_functions import Array, Rows
from ..kernels.mlx_weights import Arrays
from ..kernels.seam import RouterOutput
from ..kernels.workspace import Workspace
from ..runner.micro_batch import MicroBatchState
from .evaluations import Evaluations
from .expert_rows import ExpertRows, TiledRows, rows_of_one, zeros


class MlxExperts:
    """Runs the experts of a layer on rows of micro-batches.

    Args:
        states: the state of each micro-batch, by the micro-batch's number.
        weights: a function that returns the weights of a task, given the task's operands.
        kernels: finds the kernel of an operation, and binds it to weights and memory.
        evaluations: evaluates the lazy arrays of results, during the task or after it.
    """

    def __init__(
        self,
        config: ModelConfig,
        states: Sequence[MicroBatchState],
        weights: Callable[[View[Any]], Arrays],
        kernels: Binder,
        evaluations: Evaluations,
    ) -> None:
        self._config = config
        self._states = states
        self._weights = weights
        self._kernels = kernels
        self._evaluations = evaluations

    def group(self, task: Task, routed: RouterOutput, read: Callable[..., Any], *arrays: Array) -> Any:
        """Sort a micro-batch's rows by expert, and keep them in the micro-batch's state; returns the task's value.

        Args:
            routed: the router's result for the micro-batch's tokens.
            read: function that returns the task's value: a mapping from each expert with rows to their number. It gets
                numpy arrays: the experts of each token, and then `arrays`.
            arrays: further results of the router, such as its scores.
        """
        rows = ExpertRows(routed.x_TD, routed.experts_Tk, routed.weights_Tk)
        self._states[task.micro_batch].rows = rows
        experts = self._config.layer(task.layer).feed_forward.experts
        value = self._evaluations.value(task, read, routed.experts_Tk, *arrays, beside=rows.arrays())
        rows.counts = [value.get(expert, 0) for expert in range(experts)]
        return value

    def scores(self, logits_TE: Array) -> Array:
        """Return the probability that the router gives each of E experts, averaged over the tokens: (E), float32.

        logits_TE: the router's logits for T tokens.
        """
        return functions.scores(logits_TE)

    def run_all(self, task: Task, counts: Mapping[int, int], weights: Arrays) -> None:
        """Run all experts of a layer that have rows, one after the other, without evaluating their outputs.

        Args:
            counts: number of rows of each expert that has any.
            weights: the layer's weights.
        """
        rows: ExpertRows = self._states[task.micro_batch].rows
        for expert in counts:
            self._apply(rows, rows.span(expert), weights)

    def run_shared(self, task: Task, weights: Arrays) -> None:
        """Do nothing: the MLX device refuses models with shared experts."""

    def run_expert(self, task: Task) -> None:
        """Run one expert on its rows of one or several micro-batches.

        A micro-batch's results have the same bits as if the task were for this micro-batch alone.
        """
        weights = self._weights(task.operands)
        for micro_batch, start, stop in task.expert_rows:
            rows: ExpertRows = self._states[micro_batch].rows
            y_nD = self._apply(rows, rows.span(task.expert, start, stop), weights)
            self._evaluations.later(task, y_nD, micro_batch=micro_batch)

    def warm_expert(self, task: Task) -> None:
        """Run one expert on a row of zeros, only to read its weights, so that the system keeps them in memory."""
        x_nD = self._states[task.micro_batch].rows.x_nD
        x_1D = zeros(1, x_nD.shape[1], x_nD.dtype)
        stack, index = self._weights(task.operands).experts[task.expert]
        self._evaluations.later(task, self._run(stack, x_1D, rows_of_one(1, index, many=False)))

    def _apply(self, rows: ExpertRows, span: TiledRows, weights: Arrays) -> Array:
        """Run an expert with a layer's weights on the whole tiles of a span; returns the outputs of the span's rows."""
        stack, index = weights.experts[span.expert]
        x_nD = rows.tiles(span)
        return rows.keep(span, self._run(stack, x_nD, rows_of_one(len(x_nD), index, many=rows.many)))

    def _run(self, stack: Arrays, x_nD: Array, rows: Rows) -> Array:
        y_nD: Array = self._kernels.bound("experts", stack, Workspace(len(x_nD)))(x_nD, rows)
        return y_nD
