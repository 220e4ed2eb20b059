"""Computes a lower bound on the time per token on several nodes: Eq. 1 of the Apple silicon cluster paper (RACS'24).

    max(bytes / memory bandwidth, FLOPs / peak) + exchanges (latency + bytes exchanged / network bandwidth)

Bytes and FLOPs are counted for the busiest node: attention's projections, and the experts that it runs. As in the
paper, the router, the LM head and the KV cache are omitted.
"""

from __future__ import annotations

import msgspec

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.machines.networks import Network
from moesched.models.operations import Operations


class NodeShare(msgspec.Struct, frozen=True, kw_only=True):
    """The busiest node's share of each layer for one token.

    Attributes:
        experts: mean number of experts that the node runs.
        attention: the part of attention's projections that the node computes, from 0 to 1.
        exchanges: number of exchanges among all nodes.
    """

    experts: float
    attention: float = 1.0
    exchanges: int = 1


class TokenBound(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of Eq. 1 for one token, in seconds, and the resulting throughput.

    Attributes:
        load_seconds: time to read the weights.
        compute_seconds: time of the FLOPs, which overlap with the reading.
        latency_seconds, transfer_seconds: latency and transfer time of all exchanges.
        seconds: time of the whole token.
    """

    load_seconds: float
    compute_seconds: float
    latency_seconds: float
    transfer_seconds: float
    seconds: float
    tokens_per_second: float


def token_bound(
    operations: Operations, machine: Machine, network: Network | None, share: NodeShare
) -> TokenBound:
    """Return the parts of Eq. 1: the least time of one token, from the busiest node's work and the exchanges.

    Raises:
        BadInput: nodes exchange data without a network, or the machine has no rate for the dtype.
    """
    if share.exchanges and network is None:
        raise BadInput(f"machine {machine.name} has no network: give --network, or one in its profile")
    config = operations.config
    weights = share.attention * _attention_weights(operations) + share.experts * _expert_weights(operations)
    nbytes = config.layers * (
        share.attention * _attention_bytes(operations) + share.experts * operations.expert_bytes
    )
    flops = 2.0 * config.layers * weights
    exchanges = share.exchanges * config.layers if network else 0
    load = nbytes / machine.memories[machine.accelerator.memory].bandwidth
    compute = flops / machine.peak(machine.roles.accelerator, operations.dtype)
    latency = exchanges * network.latency_seconds if network else 0.0
    transfer = exchanges * _exchanged_bytes(operations) / network.bandwidth if network else 0.0
    seconds = max(load, compute) + latency + transfer
    return TokenBound(
        load_seconds=load,
        compute_seconds=compute,
        latency_seconds=latency,
        transfer_seconds=transfer,
        seconds=seconds,
        tokens_per_second=1 / seconds,
    )


def _attention_bytes(operations: Operations) -> int:
    """Return the bytes of a layer's projections of queries, keys, values and output (note (b) of the paper's Table 1).

    The paper's formula has D_embed squared in place of the real sizes of the projections.
    """
    return operations.before_attention.nbytes + operations.after_attention.nbytes


def _attention_weights(operations: Operations) -> int:
    return operations.before_attention.elements + operations.after_attention.elements


def _expert_weights(operations: Operations) -> int:
    return 3 * operations.config.hidden * operations.layer.feed_forward.intermediate


def _exchanged_bytes(operations: Operations) -> int:
    """Return the bytes exchanged in a layer for a token: the outputs of all its experts (Table 1's note (a))."""
    return operations.config.routed.top_k * operations.hidden_bytes
