"""The second half of a layer on torch: router, experts, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig
from moesched.routing import ScoredTokens
from moesched.tasks import Task

from ..native.arguments import LayerWeights
from ..native.buffers import Choices
from ..products.linear import Tensor
from ..products.team import use_cores
from . import kernels
from .attention import Attention
from .compute import Compute
from .expert_parts import apply_expert, apply_to_each, expert_weights
from .expert_rows import ExpertRows
from .micro_batch import MicroBatchState
from .observers import DeviceObservers
from .weights import WeightsOf


class Routed(NamedTuple):
    """The experts' input (T, D), the experts that a layer's router chooses for it (T, k), and their weights.

    Its logits (T, E) are kept only for router scores.
    """

    x_TD: Tensor
    experts_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor | None = None


class MoELayer:
    """Runs router, experts and combine on the accelerator.

    Args:
        weights: the tensors that a view shows.
        attention: runs the output projection, and knows the residual that is added to the sum of the experts.
        device_observers: receive the chosen experts, before they run.
        first_request: the number of requests in the batches before.
        scores: whether `route` and `preview_route` give router scores.
    """

    def __init__(
        self,
        config: ModelConfig,
        states: Sequence[MicroBatchState],
        weights: WeightsOf,
        attention: Attention,
        compute: Compute,
        device_observers: DeviceObservers,
        first_request: int,
        *,
        scores: bool = False,
    ) -> None:
        self._config = config
        self._scores = scores
        self._states = states
        self._weights = weights
        self._attention = attention
        self._use_cores_for = compute.use_cores_for
        self._team = compute.team
        self._products = compute.products
        self._native = compute.native
        self._device_observers = device_observers
        self._first_request = first_request

    def post_attention(self, task: Task) -> dict[int, int]:
        """Run all that follows attention: output projection, router, experts, combine."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        native, buffers, observers = self._native, state.buffers, self._device_observers
        fits = native and (buffers or native.takes_rows(len(state.hidden_TD))) and native.reads(weights)
        if not native or not fits or observers.activations:
            with torch.inference_mode():
                self._attention.project_output(task)
                return self.run_all(task)
        buffers = buffers or native.buffers(len(state.hidden_TD))
        counts = native.run(buffers, state.hidden_TD, state.attended_TX, weights)
        state.hidden_TD = buffers.hidden_TD
        del state.attended_TX
        if observers.routing is not None:
            observers.routed(task.layer, state, self._first_request, buffers.choices.experts_Tk)
        return counts

    def run_all(self, task: Task) -> dict[int, int]:
        """Run all that follows the output projection: router, experts, combine."""
        state = self._states[task.micro_batch]
        counts = self.give_rows(task, self.route(task))
        weights = self._weights(task.operands)
        if self._device_observers.activations is not None:
            for expert in counts:
                self._device_observers.applied(task.layer, [state.rows.part(expert)], expert, weights)
        shared = [expert for expert in counts if self._is_shared_out(counts[expert])]
        for expert in counts.keys() - shared:
            self._use_cores_for_expert(counts[expert])
            self._apply(state.rows, expert, weights)
        if self._team is not None and shared:
            shared.sort(key=counts.__getitem__, reverse=True)
            self._team.run([partial(self._apply, state.rows, expert, weights) for expert in shared])
        self.combine(task)
        return counts

    def choose_experts(self, task: Task) -> Mapping[int, int]:
        """Norm and router; the rows of each expert that has any, with the router's scores where they are asked for."""
        routed = self.route(task)
        return _with_scores(self.give_rows(task, routed), routed)

    def route(self, task: Task) -> Routed:
        """Norm and router."""
        state = self._states[task.micro_batch]
        choices = state.buffers.choices if state.buffers else None
        routed = self._route(state.hidden_TD, self._weights(task.operands), choices)
        self._device_observers.routed(task.layer, state, self._first_request, routed.experts_Tk)
        return routed

    def give_rows(self, task: Task, routed: Routed) -> dict[int, int]:
        """Group the rows by expert; returns the number of rows of each."""
        experts = self._config.layer(task.layer).feed_forward.experts
        grouping = kernels.group_by_expert(routed.experts_Tk, experts)
        self._states[task.micro_batch].rows = ExpertRows(routed.x_TD, grouping, routed.weights_Tk)
        return {expert: count for expert, count in enumerate(grouping.counts) if count}

    def preview_route(self, task: Task) -> Mapping[int, int]:
        """Apply another layer's norm and router to the hidden state; returns the rows that each expert would have."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        experts = weights.layer.feed_forward.experts
        self._use_cores_for(len(state.hidden_TD), self._config.hidden * experts)
        routed = self._route(state.hidden_TD, weights)
        counts = kernels.counts_of_sorted(routed.experts_Tk.view(-1).sort().values, experts)
        return _with_scores({expert: count for expert, count in enumerate(counts) if count}, routed)

    def _route(self, hidden_TD: Tensor, weights: LayerWeights, into: Choices | None = None) -> Routed:
        config, network = self._config, weights.layer.feed_forward
        if self._native and self._native.takes(hidden_TD, weights):
            x_TD, experts_Tk, weights_Tk, logits_TE = self._native.route(hidden_TD, weights, into)
            return Routed(x_TD, experts_Tk, weights_Tk, logits_TE if self._scores else None)
        x_TD = kernels.norm(hidden_TD, weights["ffn_norm"][0], config.norm_eps, config.norm)
        if network.experts == 1:
            experts_Tk = x_TD.new_zeros((len(x_TD), 1), dtype=torch.int64)
            ones_T1 = x_TD.new_ones((len(x_TD), 1), dtype=torch.float32)
            return Routed(x_TD, experts_Tk, ones_T1, ones_T1 if self._scores else None)
        logits_TE = kernels.router_logits(x_TD, weights["router"])
        chosen = kernels.choose_experts(logits_TE, network.top_k, network.weights_sum_to_one)
        return Routed(x_TD, *chosen, logits_TE if self._scores else None)

    def run_expert(self, task: Task) -> None:
        """One expert on its rows of one or several micro-batches, each as if it ran alone."""
        weights = self._weights(task.operands)
        parts = [
            self._states[micro_batch].rows.part(task.expert, start, stop)
            for micro_batch, start, stop in task.expert_rows
        ]
        self._device_observers.applied(task.layer, parts, task.expert, weights)
        apply_to_each(parts, task.expert, weights, self._products, self._use_cores_for_expert)

    def warm_expert(self, task: Task) -> None:
        """One expert on a row of zeros, only to read its weights."""
        gate, up, down = expert_weights(self._weights(task.operands), task.expert)
        self._use_cores_for_expert(1)
        x_1D = torch.zeros_like(self._states[task.micro_batch].rows.x_nD[:1])
        self._products.expert(x_1D, gate, up, down)

    def partial_sum(self, state: MicroBatchState, others: Iterable[int]) -> Tensor:
        """The weighted sum (T, D), float32, of the experts' outputs, except the experts in `others`."""
        use_cores(1)
        rows = state.rows
        for expert in others:
            span = rows.of(expert)
            rows.y_nD[span.start : span.stop] = 0
        total_TD = kernels.sum_experts(rows.y_nD, rows.grouping.rows_Tk, rows.weights_Tk)
        del state.rows
        return total_TD

    def combine(self, task: Task) -> None:
        """The weighted sum of the experts' outputs, and the residual."""
        use_cores(1)
        state = self._states[task.micro_batch]
        rows = state.rows
        residual_TD = self._attention.residual(state)
        operands = rows.y_nD, rows.grouping.rows_Tk, rows.weights_Tk, residual_TD
        if self._native and self._native.takes_rows(len(residual_TD)):
            state.hidden_TD = state.buffers.hidden_TD if state.buffers else torch.empty_like(residual_TD)
            self._native.combine(*operands, state.hidden_TD)
        else:
            state.hidden_TD = kernels.combine(*operands)
        del state.rows

    def _is_shared_out(self, rows: int) -> bool:
        """Whether an expert with that many rows gets one core; the expert kernel uses all cores for each expert."""
        by_kernel = rows <= self._products.most_rows and not self._config.routed.transposed_down
        return self._team is not None and not by_kernel

    def _use_cores_for_expert(self, tokens: int) -> None:
        self._use_cores_for(tokens, self._config.hidden * self._config.routed.intermediate)

    def _apply(self, rows: ExpertRows, expert: int, weights: LayerWeights) -> None:
        apply_expert(rows.part(expert), expert, weights, self._products)


def _with_scores(counts: Mapping[int, int], routed: Routed) -> Mapping[int, int]:
    """The value of a router's task."""
    if routed.logits_TE is None:
        return counts
    return ScoredTokens(counts, kernels.scores(routed.logits_TE).tolist())
