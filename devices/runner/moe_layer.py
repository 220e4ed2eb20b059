"""The second half of a layer: router, experts, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesched.routing import ScoredTokens
from moesched.tasks import Task

from ..kernels.binder import Binder
from ..kernels.kernel_weights import KernelWeights
from ..kernels.memory import Memory
from ..kernels.seam import Routed
from .attention import Attention, WeightsOf
from .library import Experts, Library
from .micro_batch import MicroBatchState
from .observers import DeviceObservers


class MoELayer:
    """Runs router, experts and combine on the accelerator.

    Args:
        weights: returns the tensors that a view shows.
        attention: runs the output projection, and gives the residual to add to the sum of the experts.
        observers: receive the chosen experts, before they run.
        scores: whether `route` and `preview_route` give router scores.
    """

    def __init__(
        self,
        states: Sequence[MicroBatchState],
        weights: WeightsOf,
        attention: Attention,
        kernels: Binder,
        experts: Experts,
        library: Library,
        observers: DeviceObservers,
        *,
        scores: bool = False,
    ) -> None:
        self._scores = scores
        self._states = states
        self._weights = weights
        self._attention = attention
        self._kernels = kernels
        self._experts = experts
        self._library = library
        self._observers = observers

    def post_attention(self, task: Task) -> dict[int, int]:
        """Run output projection, router, experts and combine; returns each expert's number of rows."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        observers = self._observers
        whole = None if observers.activations else self._kernels.fused("moe_layer", weights, state.room)
        if whole is None:
            with self._library.computing():
                self._attention.project_output(task)
                return self.run_all(task)
        counts: dict[int, int] | None
        state.hidden_TD, experts_Tk, counts = whole(state.attended_TX, state.hidden_TD)
        del state.attended_TX
        if counts is None:
            counts = self._experts.counts(task, _experts(weights), experts_Tk, state.hidden_TD)
        if observers.routing is not None:
            observers.routed(task.layer, state, self._library.on_host(experts_Tk))
        return counts

    def run_all(self, task: Task) -> dict[int, int]:
        """Run router, experts and combine; returns each expert's number of rows."""
        counts = self._experts.group(task, self.route(task))
        self._experts.run_all(task, counts, self._weights(task.operands))
        self.combine(task)
        self._library.settle(task.micro_batch, self._states[task.micro_batch].hidden_TD)
        return counts

    def choose_experts(self, task: Task) -> Mapping[int, int]:
        """Run norm and router; returns each expert's number of rows, with router scores if the plan requests them."""
        routed = self.route(task)
        scores = self._scores_of(routed)
        return self._with_scores(self._experts.group(task, routed, *scores), scores)

    def route(self, task: Task) -> Routed:
        """Run norm and router, and report the choices to an observer, if there is one."""
        state = self._states[task.micro_batch]
        routed = self._route(state.hidden_TD, self._weights(task.operands), state.room)
        if self._observers.routing is not None:
            self._observers.routed(task.layer, state, self._library.on_host(routed.experts_Tk))
        return routed

    def preview_route(self, task: Task) -> Mapping[int, int]:
        """Apply another layer's norm and router to the hidden state; returns the rows that each expert would have."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        routed = self._route(state.hidden_TD, weights, Memory(len(state.hidden_TD)))
        scores = self._scores_of(routed)
        counts = self._experts.counts(task, _experts(weights), routed.experts_Tk, *scores)
        return self._with_scores(counts, scores)

    def combine(self, task: Task) -> None:
        """Compute the weighted sum of the experts' outputs, and add the residual."""
        state = self._states[task.micro_batch]
        operands = *state.rows.outputs(), self._attention.residual(state)
        state.hidden_TD = self._kernels.combine(state.room)(*operands)
        del state.rows

    def _route(self, hidden_TD: Any, weights: KernelWeights[Any], memory: Memory) -> Routed:
        routed: Routed = self._kernels.bound("route", weights, memory)(hidden_TD)
        return routed

    def _scores_of(self, routed: Routed) -> list[Any]:
        """The router's scores, in a list; empty if the plan requests none."""
        return [self._experts.scores(routed.logits_TE)] if self._scores else []

    def _with_scores(self, counts: Mapping[int, int], scores: Sequence[Any]) -> Mapping[int, int]:
        """The value of a router's task: the rows of each expert, with the scores if there are any."""
        return ScoredTokens(counts, self._library.on_host(scores[0]).tolist()) if scores else counts


def _experts(weights: KernelWeights[Any]) -> int:
    assert weights.layer is not None, "a view shows a layer"
    return weights.layer.feed_forward.experts
