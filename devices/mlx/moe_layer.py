"""The second half of a layer on MLX: router, experts, and the weighted sum of what they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from moesched.models.config import ModelConfig
from moesched.seams import RoutingObserver, TokenSpan
from moesched.tasks import Task

from . import kernels
from .kernels import Array, Rows, Stack
from .micro_batch import MlxBatch
from .weights import Weights


class Routed(NamedTuple):
    """The experts' input (T, D), the experts that a layer's router chooses for it (T, k), and their weights."""

    x_TD: Array
    experts_Tk: Array
    weights_Tk: Array


class MlxMoELayer:
    """Runs router, experts and combine.

    Args:
        weights: the arrays that a view shows.
        observer: is told which experts were chosen, if anybody is.
        first_request: how many requests came in the batches before.
    """

    def __init__(
        self,
        config: ModelConfig,
        batches: Sequence[MlxBatch],
        weights: Callable[[Any], Weights],
        observer: RoutingObserver | None,
        first_request: int,
    ) -> None:
        self._config = config
        self._batches = batches
        self._weights = weights
        self._observer = observer
        self._first_request = first_request

    @property
    def verbs(self) -> Mapping[str, Callable[[Any], Any]]:
        """The implementation of each verb; built on request, so that no reference outlives a batch."""
        return {
            "preview_route": self.preview_route,
            "run_expert": self.run_expert,
            "warm_expert": self.warm_expert,
            "combine": self.combine,
        }

    def run_all(self, task: Task) -> dict[int, int]:
        """Run all that follows the output projection: router, experts, combine.

        Where all experts are in one stack, the host learns at the end who was routed where; else it waits for that, and
        they run one after the other.
        """
        batch, experts = self._batches[task.micro_batch], self._weights(task.operands).experts
        stack = experts[0][0]
        together = all(other is stack for other, _ in experts.values())
        if not together or not kernels.gathers(batch.hidden_TD.dtype):
            counts = self.choose_experts(task)
            for expert in counts:
                self._apply(batch, expert, *experts[expert])
            self.combine(task)
            return counts
        routed = self.route(task)
        self._sort_rows(batch, routed)
        y_nD = kernels.experts_ffn(batch.x_nD, stack, Rows(batch.experts_n, None, _many(batch)))
        self._finish(batch, y_nD)
        mx.eval(batch.hidden_TD, routed.experts_Tk)
        self._tell(task, batch, routed)
        return _with_rows(self._count(routed))

    def choose_experts(self, task: Task) -> dict[int, int]:
        """Norm and router; the rows of each expert that has any."""
        batch, routed = self._batches[task.micro_batch], self.route(task)
        counts = self.give_rows(batch, routed)
        self._tell(task, batch, routed)
        return counts

    def route(self, task: Task) -> Routed:
        """Norm and router, which are not evaluated."""
        config, dense = self._config, self._weights(task.operands).dense
        hidden_TD = self._batches[task.micro_batch].hidden_TD
        x_TD = kernels.norm(hidden_TD, dense["ffn_norm"][0], config.norm_eps, config.norm)
        if config.experts == 1:
            tokens = (len(x_TD), 1)
            return Routed(x_TD, mx.zeros(tokens, dtype=mx.uint32), mx.ones(tokens))
        return Routed(x_TD, *kernels.route(x_TD, dense["router"], config.top_k, config.weights_sum_to_one))

    def give_rows(self, batch: MlxBatch, routed: Routed) -> dict[int, int]:
        """Put the rows of each expert together; returns how many each one has."""
        self._sort_rows(batch, routed)
        mx.eval(batch.x_nD, batch.weights_Tk, batch.experts_n, batch.rows_Tk, routed.experts_Tk)
        batch.counts = self._count(routed)
        return _with_rows(batch.counts)

    def preview_route(self, task: Task) -> dict[int, int]:
        """Apply another layer's norm and router to the hidden state; returns the rows that each expert would have."""
        return _with_rows(self._count(self.route(task)))

    def run_expert(self, task: Task) -> None:
        """One expert on its rows."""
        batch, weights = self._batches[task.micro_batch], self._weights(task.operands)
        self._apply(batch, task.expert, *weights.experts[task.expert])
        mx.eval(batch.outputs[task.expert])

    def warm_expert(self, task: Task) -> None:
        """One expert on a row of zeros, for nothing but that its weights are read."""
        stack, place = self._weights(task.operands).experts[task.expert]
        x_1D = mx.zeros_like(self._batches[task.micro_batch].x_nD[:1])
        mx.eval(kernels.experts_ffn(x_1D, stack, _rows_of_one(1, place, many=False)))

    def partial_sum(self, batch: MlxBatch) -> Array:
        """The weighted sum (T, D), float32, of what the experts that ran here made."""
        total_TD = kernels.sum_experts(self._outputs(batch), batch.rows_Tk, batch.weights_Tk)
        mx.eval(total_TD)
        _leave_layer(batch)
        return total_TD

    def combine(self, task: Task) -> None:
        """The weighted sum of the experts' outputs, and the residual."""
        batch = self._batches[task.micro_batch]
        self._finish(batch, self._outputs(batch))
        mx.eval(batch.hidden_TD)

    def _sort_rows(self, batch: MlxBatch, routed: Routed) -> None:
        tokens_n, batch.experts_n, batch.rows_Tk = kernels.sort_rows(routed.experts_Tk)
        batch.x_nD, batch.weights_Tk = routed.x_TD[tokens_n], routed.weights_Tk

    def _outputs(self, batch: MlxBatch) -> Array:
        """The experts' outputs, row by row; zeros of those that have not run here."""
        width = batch.x_nD.shape[1]
        return mx.concatenate(
            [
                batch.outputs.get(expert, mx.zeros((count, width), dtype=batch.x_nD.dtype))
                for expert, count in enumerate(batch.counts)
                if count
            ]
        )

    def _tell(self, task: Task, batch: MlxBatch, routed: Routed) -> None:
        """Tell who watches which experts were chosen."""
        if self._observer is None:
            return
        step = batch.step
        spans = [
            TokenSpan(self._first_request + request, past, new)
            for request, past, new in zip(batch.requests, step.past, step.new, strict=True)
        ]
        self._observer.routed(task.layer, spans, np.array(routed.experts_Tk).astype(np.int64))

    def _count(self, routed: Routed) -> list[int]:
        counts = np.bincount(np.array(routed.experts_Tk).ravel(), minlength=self._config.experts)
        return [int(count) for count in counts]

    def _apply(self, batch: MlxBatch, expert: int, stack: Stack, place: int) -> None:
        start, count = sum(batch.counts[:expert]), batch.counts[expert]
        rows = _rows_of_one(count, place, many=_many(batch))
        batch.outputs[expert] = kernels.experts_ffn(batch.x_nD[start : start + count], stack, rows)

    def _finish(self, batch: MlxBatch, y_nD: Array) -> None:
        batch.hidden_TD = kernels.combine(y_nD, batch.rows_Tk, batch.weights_Tk, batch.hidden_TD)
        _leave_layer(batch)


def _leave_layer(batch: MlxBatch) -> None:
    """Let go of all that the experts needed and left."""
    del batch.x_nD, batch.weights_Tk, batch.experts_n, batch.rows_Tk
    batch.outputs = {}


def _rows_of_one(count: int, place: int, *, many: bool) -> Rows:
    return Rows(mx.full((count,), place, dtype=mx.uint32), [0] * place + [count], many)


def _many(batch: MlxBatch) -> bool:
    return len(batch.x_nD) >= kernels.MANY_ROWS


def _with_rows(counts: Sequence[int]) -> dict[int, int]:
    return {expert: count for expert, count in enumerate(counts) if count}
