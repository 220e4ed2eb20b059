"""The parts that run a batch's verbs on torch, put together from its plan."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.requests.beams import BeamSearch
from moesched.requests.sampling import Sampling
from moesched.seams import Transport
from moesched.steps.plan import Plan

from ..kernels.layer_weights import Weights
from ..shared.node_exchanges import NodeVerbs
from .attention import Attention
from .beams import BeamSearches
from .compute import Compute
from .exchange_rows import ExchangeRows
from .first_bad_tensor import FirstBadTensor
from .global_weights import GlobalWeights
from .host_experts import HostExperts
from .host_side import HostSide
from .micro_batch import MicroBatchState
from .moe_layer import MoELayer
from .next_tokens import Choice, NextTokens
from .node_side import NodeSide
from .observers import DeviceObservers
from .rank_side import RankSide
from .verbs import Parts
from .weights import WeightStore


def parts_of(
    plan: Plan,
    states: Sequence[MicroBatchState],
    choice: Choice,
    compute: Compute,
    store: WeightStore,
    *,
    global_weights: GlobalWeights | None,
    observers: DeviceObservers,
    rank: int,
    transport: Transport | None,
) -> Parts:
    """Make the parts that a plan needs.

    Args:
        global_weights: None on a node that does not attend.
        rank: the device's number where the model is cut, else 0.
        transport: None on a device alone.
    """
    config = plan.layout.config
    embedding = global_weights.embedding if global_weights else Weights()
    attention = Attention(states, store.weights, embedding, compute, rank)
    moe = MoELayer(
        config,
        states,
        store.weights,
        attention,
        compute,
        observers,
        choice.first_request,
        scores=plan.declared.scores,
    )
    tokens = beams = host = host_experts = rank_side = nodes = None
    if plan.batch.beams > 1:
        beams = _beam_searches(plan, states, choice.sampling)
    if global_weights:
        first_bad = FirstBadTensor(
            store.reader, plan.layout, compute.accelerator, fused=compute.kernels.fused_attention
        ).name
        tokens = NextTokens(config, global_weights.head, states, compute, choice, beams, first_bad)
    if not plan.machine.unified:
        exchanged = ExchangeRows(plan, compute)
        host = HostSide(plan, states, compute, store, attention, exchanged)
        host_experts = HostExperts(config, states, store.weights, compute, exchanged, moe, observers)
    if tokens and transport and config.ranks > 1:
        rank_side = RankSide(rank, transport, config.vocabulary, states, tokens.logits, tokens.draw)
    if plan.nodes.count > 1:
        assert transport is not None, "a device that is to be one of several nodes has to join them"
        side = NodeSide(plan, states, moe, compute, attention.project_output)
        nodes = NodeVerbs(plan, transport, side, tokens.sample_next if tokens else None)
    return Parts(store, attention, moe, tokens, beams, host, host_experts, rank_side, nodes)


def _beam_searches(plan: Plan, states: Sequence[MicroBatchState], sampling: Sampling) -> BeamSearches:
    searches = {
        request: BeamSearch(sampling, plan.layout.config.stop_tokens, plan.batch.new_tokens)
        for request in range(len(plan.batch.prompts))
    }
    return BeamSearches(searches, states)
