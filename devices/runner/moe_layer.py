"""The second half of a layer: router, experts, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from moesched.routing import ScoredTokens
from moesched.tasks import Task

from ..kernels.binder import Binder
from ..kernels.kernel_weights import KernelWeights
from ..kernels.memory import Memory
from ..kernels.seam import Routed
from .attention import Attention, WeightsOf
from .library import Experts, Library, counted, with_rows
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

    def post_attention(self, task: Task) -> Any:
        """Run output projection, router, experts and combine; returns each expert's number of rows, now or later."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        observers = self._observers
        whole = None if observers.activations else self._kernels.fused("moe_layer", weights, state.room)
        if whole is None:
            with self._library.computing():
                self._attention.project_output(task)
                return self.run_all(task)
        counts: dict[int, int] | None
        state.hidden_TD, experts_Tk, counts = whole(state.attended_TX, state.hidden_TD)
        self._attention.drop_attended(task)
        if counts is None:
            report = partial(observers.routed, task.layer, observers.spans(state))
            read = partial(_reported_counts, report, _experts(weights))
            return self._library.value(task, read, experts_Tk, beside=[state.hidden_TD])
        self._report(task, state, experts_Tk)
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
        self._report(task, state, routed.experts_Tk)
        return routed

    def preview_route(self, task: Task) -> Any:
        """Apply another layer's norm and router to the hidden state; returns the rows that each expert would have."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        routed = self._route(state.hidden_TD, weights, Memory(len(state.hidden_TD)))
        read = partial(_counts_and_scores, _experts(weights))
        return self._library.value(task, read, routed.experts_Tk, *self._scores_of(routed))

    def combine(self, task: Task) -> None:
        """Compute the weighted sum of the experts' outputs, and add the residual."""
        state = self._states[task.micro_batch]
        operands = *state.rows.outputs(), self._attention.residual(state)
        state.hidden_TD = self._kernels.combine(state.room)(*operands)
        del state.rows

    def _report(self, task: Task, state: MicroBatchState, experts_Tk: Any) -> None:
        """Report a router's choices to an observer, if there is one."""
        if self._observers.routing is not None:
            spans = self._observers.spans(state)
            self._observers.routed(task.layer, spans, self._library.on_host(experts_Tk))

    def _route(self, hidden_TD: Any, weights: KernelWeights[Any], memory: Memory) -> Routed:
        routed: Routed = self._kernels.bound("route", weights, memory)(hidden_TD)
        return routed

    def _scores_of(self, routed: Routed) -> list[Any]:
        """The router's scores, in a list; empty if the plan requests none."""
        return [self._experts.scores(routed.logits_TE)] if self._scores else []

    def _with_scores(self, counts: Mapping[int, int], scores: Sequence[Any]) -> Mapping[int, int]:
        """The value of a router's task: the rows of each expert, with the scores if there are any."""
        return ScoredTokens(counts, self._library.on_host(scores[0]).tolist()) if scores else counts


def _reported_counts(
    report: Callable[[npt.NDArray[Any]], None], experts: int, experts_Tk: npt.NDArray[Any]
) -> dict[int, int]:
    """Report a router's choices; returns the rows of each expert that has any."""
    report(experts_Tk)
    return with_rows(counted(experts_Tk, experts))


def _counts_and_scores(
    experts: int, experts_Tk: npt.NDArray[Any], scores_E: npt.NDArray[Any] | None = None
) -> Mapping[int, int]:
    """The rows of each expert that has any, with router scores if there are any."""
    counts = with_rows(counted(experts_Tk, experts))
    return counts if scores_E is None else ScoredTokens(counts, scores_E.tolist())


def _experts(weights: KernelWeights[Any]) -> int:
    assert weights.layer is not None, "a view shows a layer"
    return weights.layer.feed_forward.experts
