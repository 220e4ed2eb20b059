"""The verbs (kinds of tasks) of a layer's second half: router, experts, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.models.config import ModelConfig
from moesched.routing import ScoredTokens
from moesched.tasks import Task

from ..kernels.binder import Binder
from ..kernels.kernel_weights import KernelWeights
from ..kernels.seam import RouterOutput
from ..kernels.workspace import Workspace
from .attention import Attention, WeightsOf
from .library import Experts, Library, counted, with_rows
from .micro_batch import MicroBatchState
from .observers import DeviceObservers

Choices = npt.NDArray[Any]


class MoELayer:
    """Runs the verbs (kinds of tasks) of a layer after attention, on the accelerator: router, experts and combine.

    Args:
        states: the state of each micro-batch, by the micro-batch's number.
        weights: function that returns the weights in a task's view, that is, in the pages that the task reads.
        attention: runs the output projection, and returns the residual to add to the sum of the experts' outputs.
        kernels: finds the kernel of an operation, and binds it to weights and memory.
        observers: receive the experts that the router chose, and the experts' activations.
        scores: True if the values of the tasks `route` and `preview_route` have router scores, too.
    """

    def __init__(
        self,
        config: ModelConfig,
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
        self._config = config
        self._scores = scores
        self._states = states
        self._weights = weights
        self._attention = attention
        self._kernels = kernels
        self._experts = experts
        self._library = library
        self._observers = observers

    def post_attention(self, task: Task) -> Any:
        """Run output projection, router, experts and their weighted sum for a task's micro-batch.

        Returns:
            the task's value: the number of rows of each expert that has any. A device that issues tasks ahead returns
            an object from which the value is read when the task has ended.
        """
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        observers = self._observers
        if observers.activations:
            return self._observed(task)
        whole = self._kernels.fused("moe_layer", weights, state.kernel_memory())
        if whole is None:
            return self._in_parts(task)
        counts: dict[int, int] | None
        state.hidden_TD, experts_Tk, counts = whole(state.attended_TX, state.hidden_TD)
        self._attention.drop_attended(task)
        if counts is None:
            return self._library.value(task, self._reader(task), experts_Tk, beside=[state.hidden_TD])
        if observers.routing is not None and self._experts_of(task):
            observers.routed(task.layer, observers.spans(state), self._library.on_host(experts_Tk))
        return counts

    def _in_parts(self, task: Task) -> Mapping[int, int]:
        with self._library.computing():
            self._attention.project_output(task)
            return self.run_all(task)

    def _observed(self, task: Task) -> Any:
        """Do the work of `post_attention`, and report the experts' activations to an observer; returns the value."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        whole = self._kernels.fused("observed_moe_layer", weights, state.kernel_memory())
        if whole is None:
            return self._in_parts(task)
        state.hidden_TD, experts_Tk, gated_nI = whole(state.attended_TX, state.hidden_TD)
        self._attention.drop_attended(task)
        counted = self._reader(task)

        def read(experts_Tk: Choices, gated_nI: npt.NDArray[Any]) -> Mapping[int, int]:
            counts = counted(experts_Tk)
            own = np.split(gated_nI.copy(), [*accumulate(counts.values())][:-1])
            self._observers.activated(task.layer, own)
            return counts

        return self._library.value(task, read, experts_Tk, gated_nI)

    def run_all(self, task: Task) -> dict[int, int]:
        """Run router, experts and their weighted sum for a task; returns each chosen expert's number of rows."""
        counts, weights = self.group(task, self.route(task)), self._weights(task.operands)
        self._experts.run_shared(task, weights)
        self._experts.run_all(task, counts, weights)
        self.combine(task)
        self._library.settle(task.micro_batch, self._states[task.micro_batch].hidden_TD)
        return counts

    def choose_experts(self, task: Task) -> Any:
        """Run norm and router, choose each token's experts, and run the shared expert.

        Returns:
            the task's value, or an object as for `post_attention`: the number of rows of each expert that has any, with
            router scores if the plan requests them.
        """
        routed = self.route(task)
        value = self._experts.group(task, routed, self._reader(task), *self._scores_of(routed))
        self.run_shared(task)
        return value

    def run_shared(self, task: Task) -> None:
        """Run the layer's shared expert, if it has one, on all tokens of a task's micro-batch."""
        self._experts.run_shared(task, self._weights(task.operands))

    def route(self, task: Task) -> RouterOutput:
        """Run norm and router on a task's micro-batch; returns each token's experts and their weights."""
        state = self._states[task.micro_batch]
        return self._route(state.hidden_TD, self._weights(task.operands), state.kernel_memory())

    def group(self, task: Task, routed: RouterOutput, *, reports: bool = True) -> dict[int, int]:
        """Sort a micro-batch's rows by expert, and keep them in its state; returns each chosen expert's number of rows.

        Args:
            routed: the router's result for the micro-batch's tokens.
            reports: True to report the router's choices to an observer, if there is one.
        """
        read = self._reader(task) if reports else partial(_read, _ignore, self._experts_of(task))
        counts: dict[int, int] = self._library.settled(self._experts.group(task, routed, read))
        return counts

    def preview_route(self, task: Task) -> Any:
        """Apply a later layer's norm and router, which are in the task's view of pages, to the present hidden states.

        Returns:
            the task's value, or an object as for `post_attention`: the number of rows that each expert of the later
            layer would have, without zeros. Router scores are added if the plan requests them.
        """
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        routed = self._route(state.hidden_TD, weights, Workspace(len(state.hidden_TD)))
        assert weights.layer is not None, "a view shows a layer"
        read = partial(_read, _ignore, weights.layer.feed_forward.experts)
        return self._library.value(task, read, routed.experts_Tk, *self._scores_of(routed))

    def combine(self, task: Task) -> None:
        """Add the weighted sum of the experts' outputs to the residual, for a task's micro-batch."""
        state = self._states[task.micro_batch]
        operands = *state.rows.outputs(), self._attention.residual(state)
        state.hidden_TD = self._kernels.combine(state.kernel_memory())(*operands)
        del state.rows

    def _reader(self, task: Task) -> Callable[..., Mapping[int, int]]:
        """Return a function that reports a router's choices to the observer and counts the rows of each expert.

        `Library.value` calls this function with arrays on the host: each token's experts, and the scores if requested.
        """
        spans = self._observers.spans(self._states[task.micro_batch])
        experts = self._experts_of(task)
        report = partial(self._observers.routed, task.layer, spans) if experts else _ignore
        return partial(_read, report, experts)

    def _experts_of(self, task: Task) -> int:
        return self._config.layer(task.layer).feed_forward.experts

    def _route(self, hidden_TD: Any, weights: KernelWeights[Any], memory: Workspace) -> RouterOutput:
        routed: RouterOutput = self._kernels.bound("route", weights, memory)(hidden_TD)
        return routed

    def _scores_of(self, routed: RouterOutput) -> list[Any]:
        """Return the router's scores in a list of one tensor; an empty list if the plan requests no scores."""
        return [self._experts.scores(routed.logits_TE)] if self._scores else []


def _read(
    report: Callable[[Choices], None], experts: int, experts_Tk: Choices, scores_E: Choices | None = None
) -> Mapping[int, int]:
    """Call `report` with a router's choices; returns the number of rows of each expert that has any.

    Args:
        experts: number of experts of the layer.
        experts_Tk: the choices: the k experts of each of T tokens.
        scores_E: the router's score of each expert; None if scores are not wanted. With scores, the result is a
            `ScoredTokens`, a mapping that also has the scores.
    """
    report(experts_Tk)
    counts = with_rows(counted(experts_Tk, experts))
    return counts if scores_E is None else ScoredTokens(counts, scores_E.tolist())


def _ignore(experts_Tk: Choices) -> None:
    """Do nothing with a router's choices; stands in for a function that reports them."""
