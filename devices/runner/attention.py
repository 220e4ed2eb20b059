"""The verbs (kinds of tasks) of a layer's first half: queries, keys, values, attention, output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moesched.steps.views import View
from moesched.tasks import Task

from ..kernels.binder import Binder
from ..kernels.kernel_weights import KernelWeights
from ..kernels.workspace import Scratch
from .micro_batch import MicroBatchState

WeightsOf = Callable[[View[Any]], KernelWeights[Any]]
"""A function that returns the weights in a view of pages, which a task has as its operands."""


def identity(hidden_TD: Any) -> Any:
    """Return the hidden states unchanged, as the residual; ranks after the first use a function that returns zeros."""
    return hidden_TD


class Attention:
    """Runs the verbs (kinds of tasks) that come before a layer's experts.

    The KV cache is in the memory that kernels compute from.

    Args:
        states: the state of each micro-batch, by the micro-batch's number.
        weights: function that returns the weights in a task's view, that is, in the pages that the task reads.
        embedding: the weights for the verb `embed`; empty on a node that does not attend.
        kernels: finds the kernel of an operation, and binds it to weights and memory.
        residual_of: function that returns the residual, given the hidden states: the same hidden states on the first
            rank, and zeros on all other ranks.
        keeps_attended: True if, in decode steps, attention's output stays in memory until the next layer overwrites it.
    """

    def __init__(
        self,
        states: Sequence[MicroBatchState],
        weights: WeightsOf,
        embedding: KernelWeights[Any],
        kernels: Binder,
        *,
        residual_of: Callable[[Any], Any] = identity,
        keeps_attended: bool = False,
    ) -> None:
        self._states = states
        self._weights = weights
        self._embedding = embedding
        self._kernels = kernels
        self._residual_of = residual_of
        self._keeps_attended = keeps_attended
        self._scratch = Scratch()

    def embed(self, task: Task) -> None:
        """Make room in the KV cache for the step's new tokens, and look up the embeddings of these tokens."""
        state = self._states[task.micro_batch]
        state.begin(task.operands)
        state.extend()
        state.decodes = task.phase == "decode" and state.step.one_each
        ids = [token for tokens in state.new for token in tokens]
        memory = state.take_memory(len(ids), self._scratch)
        memory.decodes = state.decodes
        embed = self._kernels.bound("embed", self._embedding, memory)
        state.hidden_TD, state.angles = embed(ids, state.step.positions, state.steps)

    def pre_attention(self, task: Task) -> None:
        """Project a micro-batch's normalised hidden states to queries, keys and values, and keep these in its state."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        project = self._kernels.bound("attention_inputs", weights, state.kernel_memory())
        state.qkv = project(state.hidden_TD, state.angles)

    def attention(self, task: Task) -> None:
        """Store the keys and values of new tokens in the KV cache, and attend from the new tokens over the cache."""
        state = self._states[task.micro_batch]
        attend = self._kernels.attention(task.layer, state.kernel_memory(), decodes=state.decodes)
        state.attended_TX = attend(state.qkv, *state.cached(task.layer))
        del state.qkv

    def project_output(self, task: Task) -> None:
        """Project attention's output to the hidden size, and add the residual, for a task's micro-batch."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        project = self._kernels.bound("output_projection", weights, state.kernel_memory())
        state.hidden_TD = project(state.attended_TX, self.residual(state))
        self.drop_attended(task)

    def drop_attended(self, task: Task) -> None:
        """Free the attention output of a task's micro-batch, but keep it in decode steps if `keeps_attended` is set."""
        if not (self._keeps_attended and task.phase == "decode"):
            del self._states[task.micro_batch].attended_TX

    def residual(self, state: MicroBatchState) -> Any:
        """Return the residual of a micro-batch: its hidden states, or zeros on all ranks but the first."""
        return self._residual_of(state.hidden_TD)
