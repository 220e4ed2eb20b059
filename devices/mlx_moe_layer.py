"""The second half of a layer on MLX: router, experts, and the weighted sum of what they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from moesched.models.config import ModelConfig
from moesched.seams import RoutingObserver, TokenSpan
from moesched.tasks import Task

from . import mlx_kernels as kernels
from .mlx_kernels import Array, Rows, Stack
from .mlx_micro_batch import MlxBatch
from .mlx_weights import Weights


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
        """What runs each verb: made when asked for, so that nothing that it holds outlives a batch."""
        return {
            "preview_route": self.preview_route,
            "run_expert": self.run_expert,
            "combine": self.combine,
        }

    def run_all(self, task: Task) -> dict[int, int]:
        """What follows the output projection: router, all experts, combine.

        Where all experts are in one stack, the host learns at the end who was routed where; else it waits for that, and
        they run one after the other.
        """
        batch, experts = self._batches[task.micro_batch], self._weights(task.operands).experts
        stack = experts[0][0]
        if any(other is not stack for other, _ in experts.values()) or not kernels.gathers(
            batch.hidden_TD.dtype
        ):
            counts = self.choose_experts(task)
            for expert in counts:
                self._apply(batch, expert, *experts[expert])
            self.combine(task)
            return counts
        experts_Tk = self._route_batch(batch, task)
        rows = Rows(batch.experts_n, None, _many(batch))
        y_nD = kernels.experts_ffn(batch.x_nD, stack, rows)
        self._finish(batch, y_nD)
        mx.eval(batch.hidden_TD, experts_Tk)
        return self._told(task, batch, experts_Tk)

    def choose_experts(self, task: Task) -> dict[int, int]:
        """Norm and router; the rows of each expert that has any."""
        batch = self._batches[task.micro_batch]
        experts_Tk = self._route_batch(batch, task)
        mx.eval(batch.hidden_TD, batch.x_nD, batch.weights_Tk, batch.experts_n, batch.rows_Tk, experts_Tk)
        return self._told(task, batch, experts_Tk)

    def preview_route(self, task: Task) -> dict[int, int]:
        """What another layer's norm and router make of the hidden state: the rows that each expert would have."""
        batch = self._batches[task.micro_batch]
        _, experts_Tk, _ = self._route(batch.hidden_TD, self._weights(task.operands))
        return _with_rows(self._count(experts_Tk))

    def run_expert(self, task: Task) -> None:
        """One expert on its rows."""
        batch, weights = self._batches[task.micro_batch], self._weights(task.operands)
        self._apply(batch, task.expert, *weights.experts[task.expert])
        mx.eval(batch.outputs[task.expert])

    def combine(self, task: Task) -> None:
        """The weighted sum of the experts' outputs, and the residual."""
        batch = self._batches[task.micro_batch]
        outputs = [batch.outputs[expert] for expert in sorted(batch.outputs)]
        self._finish(batch, mx.concatenate(outputs))
        mx.eval(batch.hidden_TD)

    def _route_batch(self, batch: MlxBatch, task: Task) -> Array:
        """Prepare the rows of the experts that a micro-batch's tokens are routed to (T, k), which is returned."""
        x_TD, experts_Tk, batch.weights_Tk = self._route(batch.hidden_TD, self._weights(task.operands))
        tokens_n, batch.experts_n, batch.rows_Tk = kernels.sort_rows(experts_Tk)
        batch.x_nD = x_TD[tokens_n]
        return experts_Tk

    def _route(self, hidden_TD: Array, weights: Weights) -> tuple[Array, Array, Array]:
        """The experts' input (T, D), the experts that a layer's router chooses for it (T, k), and their weights."""
        config, dense = self._config, weights.dense
        x_TD = kernels.norm(hidden_TD, dense["ffn_norm"][0], config.norm_eps, config.norm)
        if config.experts == 1:
            return x_TD, mx.zeros((len(x_TD), 1), dtype=mx.uint32), mx.ones((len(x_TD), 1))
        return x_TD, *kernels.route(x_TD, dense["router"], config.top_k, config.weights_sum_to_one)

    def _told(self, task: Task, batch: MlxBatch, experts_Tk: Array) -> dict[int, int]:
        """Note how many rows each expert has, and tell who watches."""
        batch.counts = self._count(experts_Tk)
        if self._observer is not None:
            step = batch.step
            spans = [
                TokenSpan(self._first_request + request, past, new)
                for request, past, new in zip(batch.requests, step.past, step.new, strict=True)
            ]
            self._observer.routed(task.layer, spans, np.array(experts_Tk).astype(np.int64))
        return _with_rows(batch.counts)

    def _count(self, experts_Tk: Array) -> list[int]:
        counts = np.bincount(np.array(experts_Tk).ravel(), minlength=self._config.experts)
        return [int(count) for count in counts]

    def _apply(self, batch: MlxBatch, expert: int, stack: Stack, place: int) -> None:
        start, count = sum(batch.counts[:expert]), batch.counts[expert]
        places_n = mx.full((count,), place, dtype=mx.uint32)
        rows = Rows(places_n, [0] * place + [count], _many(batch))
        batch.outputs[expert] = kernels.experts_ffn(batch.x_nD[start : start + count], stack, rows)

    def _finish(self, batch: MlxBatch, y_nD: Array) -> None:
        batch.hidden_TD = kernels.combine(y_nD, batch.rows_Tk, batch.weights_Tk, batch.hidden_TD)
        del batch.x_nD, batch.weights_Tk, batch.experts_n, batch.rows_Tk
        batch.outputs = {}


def _many(batch: MlxBatch) -> bool:
    return len(batch.x_nD) >= kernels.MANY_ROWS


def _with_rows(counts: Sequence[int]) -> dict[int, int]:
    return {expert: count for expert, count in enumerate(counts) if count}
