"""Functions that run the tasks of a batch on MLX, by verb (kind of task), on one device or on one of several nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moesched.seams import Transport
from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..kernels.binder import Binder
from ..kernels.mlx_functions import Array
from ..kernels.mlx_weights import Arrays
from ..runner.attention import Attention
from ..runner.micro_batch import MicroBatchState
from ..runner.moe_layer import MoELayer
from ..runner.next_tokens import Choice, NextTokens
from ..runner.observers import DeviceObservers
from ..shared.node_exchanges import NodeVerbs
from ..shared.verbs import Verb, after
from .evaluations import Evaluations
from .experts import MlxExperts
from .node_side import MlxNodeSide
from .weights import MlxWeights

Verbs = dict[str, Verb]

DEFERRABLE = {
    "embed",
    "pre_attention",
    "attention",
    "cpu_attention",
    "run_expert",
    "warm_expert",
    "combine",
}
"""Verbs that may be deferred, because their results stay in a micro-batch's state and the host does not need them."""


class Topology:
    """Makes the functions that run the tasks of one batch or of serving, by verb (kind of task).

    The object is used only on the device's thread.

    Args:
        states: the states of micro-batches, with their KV caches.
        choice: the settings by which tokens are chosen.
        weights: the model's weights.
        evaluations: evaluates the lazy arrays of results, during the task or after it.
        first_bad: a function that describes the first weight that is not finite, for an error's message.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[MicroBatchState],
        choice: Choice,
        kernels: Binder,
        weights: MlxWeights,
        observers: DeviceObservers,
        evaluations: Evaluations,
        first_bad: Callable[[], str],
    ) -> None:
        self._plan = plan
        self._choice = choice
        self._weights = weights
        self._observers = observers
        self._evaluations = evaluations
        self._first_bad = first_bad
        self._states = states
        self._kernels = kernels
        self._experts = MlxExperts(plan.layout.config, self._states, weights.show, kernels, evaluations)

    def alone(self) -> Verbs:
        """Return the functions that run tasks, by verb (kind of task), for a device that has the whole model."""
        attention, moe = self._halves(self._weights.embedding)
        return self._layers(attention, moe) | {"sample": self._tokens().sample_next}

    def node(self, transport: Transport) -> Verbs:
        """Return the functions that run tasks, by verb, for a node that computes attention and some of the experts."""
        attention, moe = self._halves(self._weights.embedding)
        sample = self._tokens().sample_next
        exchanges = NodeVerbs(self._plan, transport, self._node_side(attention, moe), sample)
        return {**self._layers(attention, moe), "sample": sample, **exchanges.verbs}

    def node_of_experts(self, transport: Transport) -> Verbs:
        """Return the functions that run tasks, by verb, for a node with only experts; the first node has attention."""
        attention, moe = self._halves(Arrays())
        exchanges = NodeVerbs(self._plan, transport, self._node_side(attention, moe))
        return {**self._layers(attention, moe), **exchanges.verbs}

    def _halves(self, embedding: Arrays) -> tuple[Attention, MoELayer]:
        """Make the objects that compute a layer's two halves: attention, and router with experts."""
        states, shown, kernels = self._states, self._weights.show, self._kernels
        attention = Attention(states, shown, embedding, kernels)
        moe = MoELayer(
            self._plan.layout.config,
            states,
            shown,
            attention,
            kernels,
            self._experts,
            self._evaluations,
            self._observers,
            scores=self._plan.declared.scores,
        )
        return attention, moe

    def _layers(self, attention: Attention, moe: MoELayer) -> Verbs:
        """Return, by verb (kind of task), the functions that compute layers, embed tokens and move pages of weights."""
        weights, experts = self._weights, self._experts
        attend = self._evaluated(attention.attention, _attended)
        attend = after(lambda task: self._evaluations.close_others(task.micro_batch), attend)
        return {
            "load": weights.load,
            "fetch": weights.fetch,
            "copy_to_pinned": weights.fetch,
            "embed": self._evaluated(attention.embed, lambda state, _: (state.hidden_TD, *state.angles)),
            "pre_attention": self._evaluated(attention.pre_attention, lambda state, _: state.qkv),
            "attention": attend,
            "cpu_attention": attend,
            "post_attention": moe.post_attention,
            "route": after(attention.project_output, moe.choose_experts),
            "preview_route": moe.preview_route,
            "run_expert": experts.run_expert,
            "warm_expert": experts.warm_expert,
            "combine": self._evaluated(moe.combine, lambda state, _: (state.hidden_TD,)),
        }

    def _evaluated(self, verb: Verb, results: Callable[[MicroBatchState, int], Sequence[Array]]) -> Verb:
        """Wrap the function of a verb (kind of task) so that its results are evaluated, during the task or after it.

        results: returns the arrays to evaluate, given the micro-batch's state and the layer.
        """

        def run(task: Task) -> Any:
            value = verb(task)
            self._evaluations.later(task, *results(self._states[task.micro_batch], task.layer))
            return value

        return run

    def _tokens(self) -> NextTokens:
        return NextTokens(
            self._weights.head,
            self._states,
            self._kernels,
            self._evaluations,
            self._choice,
            lambda state: self._first_bad(),
        )

    def _node_side(self, attention: Attention, moe: MoELayer) -> MlxNodeSide:
        return MlxNodeSide(self._plan, self._states, moe, self._evaluations, attention.project_output)


def _attended(state: MicroBatchState, layer: int) -> Sequence[Array]:
    cached, _ = state.cached(layer)
    return state.attended_TX, *cached.arrays
