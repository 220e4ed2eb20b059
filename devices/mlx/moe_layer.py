"""The second half of a layer on MLX: router, experts, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from moesched.models.config import ModelConfig
from moesched.routing import ScoredTokens
from moesched.seams import RoutingObserver, TokenSpan
from moesched.tasks import Task

from . import kernels
from .evaluations import Evaluations
from .expert_rows import ExpertRows, rows_of_one, zeros
from .kernels import Array
from .micro_batch import MlxBatch
from .weights import Weights


class Routed(NamedTuple):
    """The experts' input (T, D), the experts that a layer's router chooses for it (T, k), and their weights.

    Its logits (T, E) are kept only for router scores.
    """

    x_TD: Array
    experts_Tk: Array
    weights_Tk: Array
    logits_TE: Array | None = None

    def rows(self) -> ExpertRows:
        """The rows of all experts."""
        return ExpertRows(self.x_TD, self.experts_Tk, self.weights_Tk)


class MlxMoELayer:
    """Runs router, experts and combine.

    Args:
        weights: the arrays that a view shows.
        evaluations: evaluates results.
        observer: receives the chosen experts; None for no observer.
        first_request: number of requests in the batches before.
        scores: whether `route` and `preview_route` give router scores.
    """

    def __init__(
        self,
        config: ModelConfig,
        batches: Sequence[MlxBatch],
        weights: Callable[[Any], Weights],
        evaluations: Evaluations,
        observer: RoutingObserver | None,
        first_request: int,
        *,
        scores: bool = False,
    ) -> None:
        self._config = config
        self._scores = scores
        self._batches = batches
        self._weights = weights
        self._evaluations = evaluations
        self._observer = observer
        self._first_request = first_request

    def run_all(self, task: Task) -> dict[int, int]:
        """Run all that follows the output projection: router, experts, combine.

        Where all experts are in one stack, the host learns the routing at the end; otherwise it waits for the routing,
        and the experts run one after the other.
        """
        batch, experts = self._batches[task.micro_batch], self._weights(task.operands).experts
        stack = experts[0][0]
        together = all(other is stack for other, _ in experts.values())
        if not together or not kernels.gathers(batch.hidden_TD.dtype):
            routed = self.route(task)
            counts = self.give_rows(task, routed)
            self._tell(task, batch, routed)
            for expert in counts:
                batch.rows.apply(expert, *experts[expert])
            _finish(batch, batch.rows.outputs_nD())
            self._evaluations.now(task.micro_batch, batch.hidden_TD)
            return counts
        routed = self.route(task)
        batch.rows = routed.rows()
        _finish(batch, batch.rows.apply_all(stack))
        self._evaluations.now(task.micro_batch, batch.hidden_TD, routed.experts_Tk)
        self._tell(task, batch, routed)
        return _with_rows(self._count(task, routed))

    def choose_experts(self, task: Task) -> Mapping[int, int]:
        """Norm and router; the rows of each expert that has any, with the router's scores where they are asked for."""
        batch, routed = self._batches[task.micro_batch], self.route(task)
        scores = self._scores_of(routed)
        counts = self.give_rows(task, routed, *scores)
        self._tell(task, batch, routed)
        return _with_scores(counts, scores)

    def route(self, task: Task) -> Routed:
        """Norm and router, which are not evaluated."""
        config, dense = self._config, self._weights(task.operands).dense
        network = config.layer(task.layer).feed_forward
        hidden_TD = self._batches[task.micro_batch].hidden_TD
        x_TD = kernels.norm(hidden_TD, dense["ffn_norm"][0], config.norm_eps, config.norm)
        if network.experts == 1:
            experts_T1, ones_T1 = mx.zeros((len(x_TD), 1), dtype=mx.uint32), mx.ones((len(x_TD), 1))
            return Routed(x_TD, experts_T1, ones_T1, ones_T1 if self._scores else None)
        logits_TE = kernels.router_logits(x_TD, dense["router"])
        chosen = kernels.choose_experts(logits_TE, network.top_k, network.weights_sum_to_one)
        return Routed(x_TD, *chosen, logits_TE if self._scores else None)

    def give_rows(self, task: Task, routed: Routed, *beside: Array) -> dict[int, int]:
        """Group the rows by expert, and evaluate arrays beside that; returns the number of rows of each."""
        rows = self._batches[task.micro_batch].rows = routed.rows()
        self._evaluations.now(task.micro_batch, *rows.arrays(), routed.experts_Tk, *beside)
        rows.counts = self._count(task, routed)
        return _with_rows(rows.counts)

    def preview_route(self, task: Task) -> Mapping[int, int]:
        """Apply another layer's norm and router to the hidden state; returns the rows that each expert would have."""
        routed = self.route(task)
        scores = self._scores_of(routed)
        self._evaluations.now(task.micro_batch, routed.experts_Tk, *scores)
        return _with_scores(_with_rows(self._count(task, routed)), scores)

    def run_expert(self, task: Task) -> None:
        """Run one expert on its rows of one or several micro-batches, each as if it ran alone."""
        stack, index = self._weights(task.operands).experts[task.expert]
        for micro_batch, start, stop in task.expert_rows:
            rows = self._batches[micro_batch].rows
            y_nD = rows.apply(task.expert, stack, index, range(start, stop))
            self._evaluations.later(task, y_nD, micro_batch=micro_batch)

    def warm_expert(self, task: Task) -> None:
        """Run one expert on a row of zeros, only to read its weights."""
        stack, index = self._weights(task.operands).experts[task.expert]
        x_nD = self._batches[task.micro_batch].rows.x_nD
        x_1D = zeros(1, x_nD.shape[1], x_nD.dtype)
        y_1D = kernels.experts_ffn(x_1D, stack, rows_of_one(1, index, many=False))
        self._evaluations.later(task, y_1D)

    def partial_sum(self, task: Task) -> npt.NDArray[np.float32]:
        """The weighted sum (T, D), float32, of the outputs of the experts that ran here, on the host."""
        batch = self._batches[task.micro_batch]
        rows = batch.rows
        total_TD = kernels.sum_experts(rows.by_token(rows.outputs_nD()), rows.weights_Tk)
        del batch.rows
        return self._evaluations.on_host(task.micro_batch, total_TD)

    def combine(self, task: Task) -> None:
        """Add the weighted sum of the experts' outputs to the residual."""
        batch = self._batches[task.micro_batch]
        _finish(batch, batch.rows.outputs_nD())
        self._evaluations.later(task, batch.hidden_TD)

    def _tell(self, task: Task, batch: MlxBatch, routed: Routed) -> None:
        """Tell the observer which experts were chosen."""
        if self._observer is None:
            return
        step = batch.step
        spans = [
            TokenSpan(self._first_request + request, past, new)
            for request, past, new in zip(batch.requests, step.past, step.new, strict=True)
        ]
        self._observer.routed(task.layer, spans, np.array(routed.experts_Tk).astype(np.int64))

    def _scores_of(self, routed: Routed) -> list[Array]:
        """The router's scores, which are not evaluated; empty where none are asked for."""
        return [] if routed.logits_TE is None else [kernels.scores(routed.logits_TE)]

    def _count(self, task: Task, routed: Routed) -> list[int]:
        experts = self._config.layer(task.layer).feed_forward.experts
        counts = np.bincount(np.array(routed.experts_Tk).ravel(), minlength=experts)
        return [int(count) for count in counts]


def _finish(batch: MlxBatch, y_nD: Array) -> None:
    """Add the weighted sum of the experts' outputs to the hidden states, and drop the layer's rows."""
    rows = batch.rows
    batch.hidden_TD = kernels.combine(rows.by_token(y_nD), rows.weights_Tk, batch.hidden_TD)
    del batch.rows


def _with_scores(counts: Mapping[int, int], scores: Sequence[Array]) -> Mapping[int, int]:
    """The value of a router's task."""
    if not scores:
        return counts
    return ScoredTokens(counts, np.array(scores[0]).tolist())


def _with_rows(counts: Sequence[int]) -> dict[int, int]:
    return {expert: count for expert, count in enumerate(counts) if count}
