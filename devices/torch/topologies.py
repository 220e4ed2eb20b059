"""Functions that run the tasks of a batch on torch, by verb (kind of task), on a device alone, a rank, or a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moesched.requests.beams import BeamSearch
from moesched.requests.sampling import Sampling
from moesched.seams import Transport
from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..kernels.layer_weights import Weights
from ..products.linear import Tensor
from ..runner.attention import Attention, identity
from ..runner.micro_batch import MicroBatchState
from ..runner.moe_layer import MoELayer
from ..runner.next_tokens import Choice, NextTokens
from ..runner.observers import DeviceObservers
from ..shared.node_exchanges import NodeVerbs
from ..shared.verbs import Verb, after
from .at_once import library_of
from .beams import BeamSearches
from .compute import Compute
from .exchange_rows import ExchangeRows
from .experts import TorchExperts
from .first_bad_tensor import FirstBadTensor
from .global_weights import GlobalWeights
from .host_experts import HostExperts
from .host_side import HostSide, kv_slots_of
from .node_side import NodeSide
from .rank_side import RankSide
from .weights import WeightStore

Verbs = dict[str, Verb]


class Topology:
    """Makes the functions that run the tasks of one batch, by verb (kind of task).

    Most functions run in torch's inference mode. Functions that may consist of a single native call enter the mode only
    before they call torch, since entering it takes longer than all other Python code around a native call.

    Attributes:
        kv_slots: buffers on the accelerator that keys and values of a layer are copied to from the host.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[MicroBatchState],
        choice: Choice,
        compute: Compute,
        store: WeightStore,
        observers: DeviceObservers,
    ) -> None:
        self.kv_slots = kv_slots_of(plan, compute)
        self._plan = plan
        self._states = states
        self._choice = choice
        self._compute = compute
        self._library = library_of(compute.accelerator)
        self._store = store
        self._observers = observers
        self._experts = TorchExperts(
            plan.layout.config, states, store.weights, compute, self._library, observers
        )
        self._beams = _beam_searches(plan, states, choice.sampling) if plan.batch.beams > 1 else None

    def alone(self, weights: GlobalWeights) -> Verbs:
        """Return the functions that run tasks, by verb (kind of task), for a device that has the whole model."""
        attention, moe = self._halves(weights.embedding)
        return self._layers(attention, moe) | self._ends(self._tokens(weights))

    def rank(self, weights: GlobalWeights, rank: int, transport: Transport) -> Verbs:
        """Return the functions that run tasks, by verb (kind of task), for a rank with a share of every matrix."""
        attention, moe = self._halves(weights.embedding, torch.zeros_like if rank else identity)
        tokens, vocabulary = self._tokens(weights), self._plan.layout.config.vocabulary
        side = RankSide(rank, transport, vocabulary, self._states, tokens.logits, tokens.draw)
        own: Verbs = {
            "post_attention": moe.run_all,
            "route": moe.choose_experts,
            "all_reduce": side.all_reduce,
            "logits": side.logits,
            "sample": side.sample,
        }
        return self._layers(attention, moe) | self._ends(tokens) | inferring(own)

    def node(self, weights: GlobalWeights, transport: Transport) -> Verbs:
        """Return the functions that run tasks, by verb, for a node that computes attention and some of the experts."""
        attention, moe = self._halves(weights.embedding)
        tokens, side = self._tokens(weights), self._node_side(attention, moe)
        exchanges = NodeVerbs(self._plan, transport, side, tokens.sample_next).verbs
        return self._layers(attention, moe) | self._ends(tokens) | inferring(exchanges)

    def node_of_experts(self, transport: Transport) -> Verbs:
        """Return the functions that run tasks, by verb, for a node with only experts; the first node has attention."""
        attention, moe = self._halves(Weights())
        exchanges = NodeVerbs(self._plan, transport, self._node_side(attention, moe)).verbs
        return self._layers(attention, moe) | inferring(exchanges)

    def _halves(
        self, embedding: Weights, residual_of: Callable[[Tensor], Tensor] = identity
    ) -> tuple[Attention, MoELayer]:
        """Make the objects that compute a layer's two halves: attention, and router with experts.

        residual_of: a function that returns the residual to add to the output projection, given the hidden states.
        """
        kernels, shown = self._compute.kernels, self._store.weights
        attention = Attention(
            self._states,
            shown,
            embedding,
            kernels,
            residual_of=residual_of,
            # On CUDA attention's output of a decode step belongs to the stream that copied it.
            keeps_attended=not self._compute.on_cpu,
        )
        moe = MoELayer(
            self._plan.layout.config,
            self._states,
            shown,
            attention,
            kernels,
            self._experts,
            self._library,
            self._observers,
            scores=self._plan.declared.scores,
        )
        return attention, moe

    def _layers(self, attention: Attention, moe: MoELayer) -> Verbs:
        """Return, by verb (kind of task), the functions that compute layers, embed tokens and move pages of weights."""
        store, experts = self._store, self._experts
        verbs: Verbs = {
            "embed": attention.embed,
            "pre_attention": attention.pre_attention,
            "attention": attention.attention,
            "cpu_attention": attention.attention,
            "post_attention": moe.post_attention,
        }
        verbs |= inferring(
            {
                "load": store.load,
                "fetch": store.fetch,
                "copy_to_pinned": store.fetch,
                "output_projection": attention.project_output,
                "route": after(attention.project_output, moe.choose_experts),
                "preview_route": after(experts.before_preview, moe.preview_route),
                "run_expert": experts.run_expert,
                "warm_expert": experts.warm_expert,
                "combine": moe.combine,
            }
        )
        return verbs if self._plan.machine.unified else verbs | self._host(attention)

    def _host(self, attention: Attention) -> Verbs:
        """Return, by verb, the functions for tasks that exist only if accelerator and host have separate memories."""
        plan, states, compute, store = self._plan, self._states, self._compute, self._store
        exchanged = ExchangeRows(plan, compute)
        host = HostSide(plan, states, compute, store, attention, exchanged, self.kv_slots)
        experts = HostExperts(
            plan.layout.config, states, store.weights, compute, exchanged, self._experts, self._observers
        )
        verbs: Verbs = {"cpu_attention": host.cpu_attention}
        return verbs | inferring(
            {
                "fetch": host.bring,
                "copy_to_pinned": host.bring,
                "attention": host.attention,
                "offload_qkv": host.offload_qkv,
                "load_hidden": host.load_hidden,
                "offload_kv": host.offload_kv,
                "load_kv": host.load_kv,
                "run_expert": experts.run_expert,
                "offload_routed": experts.offload_routed,
                "load_routed": experts.load_routed,
            }
        )

    def _tokens(self, weights: GlobalWeights) -> NextTokens:
        compute, store = self._compute, self._store
        first_bad = FirstBadTensor(
            store.reader, self._plan.layout, compute.accelerator, fused=compute.kernels.fused_attention
        )
        return NextTokens(
            weights.head,
            self._states,
            compute.kernels,
            self._library,
            self._choice,
            first_bad.name,
            self._beams,
        )

    def _ends(self, tokens: NextTokens) -> Verbs:
        """Return the functions of the verbs (kinds of tasks) that end a step: `sample`, and `reorder` for beams."""
        verbs: Verbs = {"sample": tokens.sample_next}
        return verbs | inferring({"reorder": self._beams.reorder}) if self._beams else verbs

    def _node_side(self, attention: Attention, moe: MoELayer) -> NodeSide:
        return NodeSide(self._plan, self._states, moe, self._compute, attention.project_output)


def inferring(verbs: Mapping[str, Verb]) -> Verbs:
    """Wrap the function of each verb (kind of task) so that it runs in torch's inference mode."""
    return {name: _inferring(verb) for name, verb in verbs.items()}


def _inferring(verb: Verb) -> Verb:
    def run(task: Task) -> Any:
        with torch.inference_mode():
            return verb(task)

    return run


def _beam_searches(plan: Plan, states: Sequence[MicroBatchState], sampling: Sampling) -> BeamSearches:
    searches = {
        request: BeamSearch(sampling, plan.layout.config.stop_tokens, plan.batch.new_tokens)
        for request in range(len(plan.batch.prompts))
    }
    return BeamSearches(searches, states)
