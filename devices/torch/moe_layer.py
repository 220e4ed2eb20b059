"""The second half of a layer on torch: router, experts, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from moesched.models.config import ModelConfig
from moesched.routing import ScoredTokens
from moesched.tasks import Task

from ..kernels import functions
from ..kernels.layer_weights import Weights
from ..kernels.memory import Memory
from ..kernels.torch_rows import Routed
from ..products.linear import Tensor
from ..products.team import use_cores
from .attention import Attention
from .compute import Compute
from .expert_parts import ExpertRunner, Part
from .expert_rows import ExpertRows
from .micro_batch import MicroBatchState
from .observers import DeviceObservers
from .weights import WeightsOf


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
        self._kernels = compute.kernels
        self._team = compute.kernels.team
        self._experts = ExpertRunner(config, compute.kernels, compute.use_cores_for)
        self._device_observers = device_observers
        self._first_request = first_request

    def post_attention(self, task: Task) -> dict[int, int]:
        """Run all that follows attention: output projection, router, experts, combine."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        observers = self._device_observers
        whole = None if observers.activations else self._kernels.fused("moe_layer", weights, state.room)
        if whole is None:
            with torch.inference_mode():
                self._attention.project_output(task)
                return self.run_all(task)
        counts: dict[int, int]
        state.hidden_TD, experts_Tk, counts = whole(state.attended_TX, state.hidden_TD)
        del state.attended_TX
        if observers.routing is not None:
            observers.routed(task.layer, state, self._first_request, experts_Tk)
        return counts

    def run_all(self, task: Task) -> dict[int, int]:
        """Run all that follows the output projection: router, experts, combine."""
        state = self._states[task.micro_batch]
        counts = self.give_rows(task, self.route(task))
        weights = self._weights(task.operands)
        if self._device_observers.activations is not None:
            for expert in counts:
                self._device_observers.applied(task.layer, [state.rows.part(expert)], expert, weights)
        shared = [expert for expert in counts if self._is_shared_out(weights, expert, counts[expert])]
        for expert in counts.keys() - shared:
            self._experts.apply([state.rows.part(expert)], expert, weights)
        if self._team is not None and shared:
            shared.sort(key=counts.__getitem__, reverse=True)
            self._team.run(
                [
                    partial(self._experts.apply_part, state.rows.part(expert), expert, weights)
                    for expert in shared
                ]
            )
        self.combine(task)
        return counts

    def choose_experts(self, task: Task) -> Mapping[int, int]:
        """Norm and router; the rows of each expert that has any, with the router's scores where they are asked for."""
        routed = self.route(task)
        return self._with_scores(self.give_rows(task, routed), routed)

    def route(self, task: Task) -> Routed:
        """Norm and router."""
        state = self._states[task.micro_batch]
        routed = self._route(state.hidden_TD, self._weights(task.operands), state.room)
        self._device_observers.routed(task.layer, state, self._first_request, routed.experts_Tk)
        return routed

    def _route(self, hidden_TD: Tensor, weights: Weights, memory: Memory) -> Routed:
        routed: Routed = self._kernels.bound("route", weights, memory)(hidden_TD)
        return routed

    def give_rows(self, task: Task, routed: Routed) -> dict[int, int]:
        """Group the rows by expert; returns the number of rows of each."""
        experts = self._config.layer(task.layer).feed_forward.experts
        grouping = functions.group_by_expert(routed.experts_Tk, experts)
        self._states[task.micro_batch].rows = ExpertRows(routed.x_TD, grouping, routed.weights_Tk)
        return {expert: count for expert, count in enumerate(grouping.counts) if count}

    def preview_route(self, task: Task) -> Mapping[int, int]:
        """Apply another layer's norm and router to the hidden state; returns the rows that each expert would have."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        assert weights.layer is not None, "a view shows a layer"
        experts = weights.layer.feed_forward.experts
        self._use_cores_for(len(state.hidden_TD), self._config.hidden * experts)
        routed = self._route(state.hidden_TD, weights, Memory(len(state.hidden_TD)))
        counts = functions.counts_of_sorted(routed.experts_Tk.view(-1).sort().values, experts)
        return self._with_scores({expert: count for expert, count in enumerate(counts) if count}, routed)

    def run_expert(self, task: Task) -> None:
        """One expert on its rows of one or several micro-batches, each as if it ran alone."""
        weights = self._weights(task.operands)
        parts = [
            self._states[micro_batch].rows.part(task.expert, start, stop)
            for micro_batch, start, stop in task.expert_rows
        ]
        self._device_observers.applied(task.layer, parts, task.expert, weights)
        self._experts.apply(parts, task.expert, weights)

    def warm_expert(self, task: Task) -> None:
        """One expert on a row of zeros, only to read its weights."""
        x_1D = torch.zeros_like(self._states[task.micro_batch].rows.x_nD[:1])
        part = Part(x_1D, torch.empty_like(x_1D), range(1), range(1))
        self._experts.apply([part], task.expert, self._weights(task.operands))

    def partial_sum(self, state: MicroBatchState, others: Iterable[int]) -> Tensor:
        """The weighted sum (T, D), float32, of the experts' outputs, except the experts in `others`."""
        use_cores(1)
        rows = state.rows
        for expert in others:
            span = rows.of(expert)
            rows.y_nD[span.start : span.stop] = 0
        total_TD = functions.sum_experts(rows.y_nD, rows.grouping.rows_Tk, rows.weights_Tk)
        del state.rows
        return total_TD

    def combine(self, task: Task) -> None:
        """The weighted sum of the experts' outputs, and the residual."""
        use_cores(1)
        state = self._states[task.micro_batch]
        rows = state.rows
        operands = rows.y_nD, rows.grouping.rows_Tk, rows.weights_Tk, self._attention.residual(state)
        state.hidden_TD = self._kernels.combine(state.room)(*operands)
        del state.rows

    def _is_shared_out(self, weights: Weights, expert: int, rows: int) -> bool:
        """Whether an expert gets one core; a kernel with threads of its own uses all cores for each expert."""
        return self._team is not None and not self._kernels.expert(weights, expert, rows)[0].has_threads

    def _with_scores(self, counts: Mapping[int, int], routed: Routed) -> Mapping[int, int]:
        """The value of a router's task."""
        if not self._scores or routed.logits_TE is None:
            return counts
        return ScoredTokens(counts, functions.scores(routed.logits_TE).tolist())
