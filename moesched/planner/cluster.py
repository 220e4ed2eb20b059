"""Makes the proposal of `moesched plan --nodes`: the best split of a model, with its least time per token.

Eq. 1 of the Apple silicon cluster paper (RACS'24) bounds the time per token of each way to split a model, given the
placement of experts and the best assignment of each token's experts to nodes. Nothing is simulated, and no workload is
needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from moesched.dispatch.node_placement import (
    Load,
    Placement,
    best_placement,
    expected_load,
    mirrored,
    parts_for,
)
from moesched.errors import BadInput
from moesched.inputs.budgets import read_budgets
from moesched.inputs.lookup import changed_machine, find_shape
from moesched.inputs.options import ClusterPlanOptions
from moesched.keywords import takes
from moesched.machines import Machine
from moesched.machines.networks import Network, load_network
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.operations import Operations
from moesched.planner.node_bound import NodeShare, TokenBound, token_bound
from moesched.units import format_bytes, format_seconds

AUTHORS = "ep_router_aided"
BALANCED = "ep_balanced"
POLICIES = (AUTHORS, BALANCED)
"""Policies that run each chosen expert on one node: with the paper's placement of experts, and with the optimiser's."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to split a model over nodes.

    Attributes:
        experts: "whole" if an expert is not divided and is on one node or on several; "cut" if every node has an equal
            part of each expert.
        replicas: number of nodes that hold an expert, on average.
        attention: "replicated" on all nodes, or "sharded", which takes one more exchange in each layer.
        policy: name of a shipped policy that splits the model in this way; None if there is none.
        expected_experts: mean number of a token's experts that the busiest node runs in a layer.
        bytes_per_node: bytes of weights on each node.
        bound: the bound on the time of one token, by Eq. 1.
        kernel_seconds: seconds to launch the experts' kernels for a token, which Eq. 1 omits.
        token_seconds: seconds of a token: the sum of the bound and the launches.
    """

    experts: str
    replicas: float
    attention: str
    policy: str | None
    expected_experts: float
    bytes_per_node: int
    bound: TokenBound
    kernel_seconds: float
    token_seconds: float


class ClusterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen way to split a model: the way that takes the least time per token.

    Attributes:
        best: the fastest way, which may have no policy.
        why: the reasons, one sentence each.
        runs: the fastest way that a shipped policy implements.
    """

    best: Way
    runs: Way
    why: list[str]


class ClusterProposal(msgspec.Struct, frozen=True, kw_only=True):
    """The best placement and split of a model on a cluster of equal machines.

    Attributes:
        policy: the expert-parallel policy that `placement` and `bound` are for.
        bound: the bound on the time of one token, by Eq. 1.
        expected_experts: mean number of a token's experts that the busiest node runs in a layer;
            `expected_experts_error` is its standard error, 0 if all choices were enumerated.
        placement: the numbers of the experts that each node holds.
        experts_that_fit: number of experts per layer that fit in a node's memory.
        price_usd: price of all nodes with their network cards; None if the machine's price is not known.
        ways: all ways to split the model, the fastest first.
    """

    model: str
    machine: str
    network: str
    nodes: int
    dtype: str
    policy: str
    bound: TokenBound
    expected_experts: float
    expected_experts_error: float
    placement: list[list[int]]
    experts_that_fit: int
    price_usd: float | None
    tokens_per_second_per_usd: float | None
    choice: ClusterChoice
    ways: list[Way]


@takes(ClusterPlanOptions)
def plan_cluster(given: ClusterPlanOptions) -> ClusterProposal:
    """Bound the time of a model's tokens on several equal machines, and find the best way to split the model.

    Raises:
        BadInput: an argument cannot be used, or the nodes' memories are too small; the message names the missing bytes.
    """
    config, found = find_shape(given.model), changed_machine(given.machine, given.machine_set)
    if found.accelerator_group.count > 1:
        raise BadInput(
            f"machine {found.name} has {found.accelerator_group.count} accelerators, and --nodes supports "
            "one: name another machine"
        )
    if config.routed.experts < 2:
        raise BadInput(
            f"{config.name} has one expert a layer, and --nodes divides experts among nodes: name a MoE model"
        )
    joined, nodes = _network(found, given.network), given.nodes
    layout = weight_layout(config, given.dtype)
    cluster = _Cluster(config, found, joined, layout, nodes, _budget(found, given.budgets))
    chosen = given.policy or AUTHORS
    if chosen not in POLICIES:
        raise BadInput(f"--policy {chosen} does not go with --nodes: choose one of {', '.join(POLICIES)}")
    placement = cluster.placement(chosen)
    load = expected_load(placement, config.routed.top_k)
    bound = cluster.bound(NodeShare(experts=load.experts, exchanges=cluster.exchanges))
    price = None if found.price_usd is None else nodes * (found.price_usd + joined.price_usd)
    ways = sorted(cluster.ways(), key=lambda way: way.token_seconds)
    return ClusterProposal(
        model=config.name,
        machine=found.name,
        network=joined.name,
        nodes=nodes,
        dtype=layout.dtype,
        policy=chosen,
        bound=bound,
        expected_experts=load.experts,
        expected_experts_error=load.error,
        placement=[sorted(held) for held in placement],
        experts_that_fit=cluster.that_fit,
        price_usd=price,
        tokens_per_second_per_usd=None if price is None else bound.tokens_per_second / price,
        choice=cluster.choose(ways),
        ways=ways,
    )


class _Bytes(NamedTuple):
    """Bytes of weights: dense weights of all layers, one expert in all layers, and weights outside of layers."""

    dense: int
    expert: int
    outside: int


class _Cluster:
    """A model on several equal nodes, each of which has `budget` bytes for weights."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        network: Network,
        layout: WeightLayout,
        nodes: int,
        budget: int,
    ) -> None:
        self.config, self.machine, self.network, self.nodes = config, machine, network, nodes
        self.operations = Operations(config, layout.dtype)
        self.bytes = _bytes(layout)
        self.exchanges = 1 if nodes > 1 else 0
        self.budget = budget
        left = budget - self.bytes.dense - self.bytes.outside
        self.that_fit = min(config.routed.experts, max(0, left // self.bytes.expert))

    def bound(self, share: NodeShare) -> TokenBound:
        """Return the bound on the time of one token, by Eq. 1, given the busiest node's share of each layer."""
        return token_bound(self.operations, self.machine, self.network, share)

    def placement(self, policy: str) -> Placement:
        """Return the experts on each node, as a policy places them within the memory budget.

        Raises:
            BadInput: the nodes cannot hold the experts.
        """
        experts, nodes = self.config.routed.experts, self.nodes
        try:
            parts = parts_for(experts, nodes, self.that_fit)
        except BadInput:
            needed = self.needed(-(-experts // nodes))
            raise BadInput(
                f"--nodes {nodes} of {format_bytes(self.budget)} each is too small for {self.config.name}, which takes "
                f"{format_bytes(needed)} of each: {format_bytes(needed - self.budget)} too little: add nodes"
            ) from None
        if policy == AUTHORS:
            return mirrored(experts, nodes, max(2, parts))
        return best_placement(experts, self.config.routed.top_k, nodes, self.that_fit)

    def needed(self, experts: float, attention: float = 1.0) -> int:
        """Return the bytes of weights on a node.

        Args:
            experts: number of experts that the node holds in each layer, on average.
            attention: the node's share of the dense weights.
        """
        return round(self.bytes.outside + attention * self.bytes.dense + experts * self.bytes.expert)

    def ways(self) -> Iterator[Way]:
        """Yield all ways to split the model that fit in the nodes' memories."""
        network, nodes = self.config.routed, self.nodes
        once = mirrored(network.experts, nodes, nodes)
        authors = self.placement(AUTHORS)
        yield from self._whole(once, AUTHORS if once == authors else None, expected_load(once, network.top_k))
        for policy in POLICIES:
            placement = self.placement(policy)
            if placement != once:
                yield from self._whole(placement, policy, expected_load(placement, network.top_k))
        if nodes > 1:
            share = -(-network.intermediate // nodes) / network.intermediate
            load = network.top_k * share
            held = network.experts * share
            yield from self._both(1.0, "cut", None, load, network.top_k, held)

    def _whole(self, placement: Placement, policy: str | None, load: Load) -> Iterator[Way]:
        held = sum(map(len, placement))
        most = max(map(len, placement))
        yield from self._both(
            held / self.config.routed.experts, "whole", policy, load.experts, load.experts, most
        )

    def _both(
        self, replicas: float, experts: str, policy: str | None, load: float, kernels: float, held: float
    ) -> Iterator[Way]:
        """Yield two ways with one placement of experts: attention replicated and, on several nodes, attention sharded.

        Args:
            replicas: number of nodes that hold an expert, on average.
            experts: "whole" if a node holds whole experts, "cut" if each expert is cut over nodes.
            policy: name of a policy with this placement of experts and replicated attention; None if there is none.
            load: mean number of a token's experts that the busiest node runs in a layer.
            kernels: number of kernel launches in a layer.
            held: number of experts that a node holds in each layer.
        """
        config, nodes = self.config, self.nodes
        kv_heads = config.typical_layer.attention.cached_heads
        heads = -(-kv_heads // nodes) / kv_heads
        for attention, share in (("replicated", 1.0), ("sharded", heads)):
            if attention == "sharded" and nodes == 1:
                continue
            node = NodeShare(
                experts=load,
                attention=share,
                exchanges=self.exchanges * (2 if attention == "sharded" else 1),
            )
            bound = self.bound(node)
            launches = config.layers * kernels * self.machine.accelerator.launch_seconds
            yield Way(
                experts=experts,
                replicas=replicas,
                attention=attention,
                policy=policy if attention == "replicated" else None,
                expected_experts=load,
                bytes_per_node=self.needed(held, share),
                bound=bound,
                kernel_seconds=launches,
                token_seconds=bound.seconds + launches,
            )

    def choose(self, ways: list[Way]) -> ClusterChoice:
        """Choose the first of `ways`, which are sorted by time, and give the reasons."""
        best = ways[0]
        runs = next(way for way in ways if way.policy is not None)
        return ClusterChoice(best=best, runs=runs, why=list(self._why(best, ways)))

    def _why(self, best: Way, ways: list[Way]) -> Iterator[str]:
        config = self.config
        whole = [way for way in ways if way.experts == "whole" and way.attention == best.attention]
        once = next(way for way in whole if way.replicas <= 1)
        most = min(whole, key=lambda way: way.token_seconds)
        if most.replicas > 1:
            yield (
                f"replicas: room for {self.that_fit} of {config.routed.experts} experts on a node brings the busiest "
                f"one from {once.expected_experts:.4g} to {most.expected_experts:.4g} experts a layer, which saves "
                f"{format_seconds(once.token_seconds - most.token_seconds)} of a token"
            )
        cut = next((way for way in ways if way.experts == "cut" and way.attention == best.attention), None)
        if cut is not None:
            better, worse = (cut, most) if best.experts == "cut" else (most, cut)
            yield (
                f"experts {better.experts}: cutting them reads {cut.expected_experts:.4g} experts' weights a layer "
                f"instead of {most.expected_experts:.4g}, in {config.routed.top_k} narrower kernels; "
                f"a token takes {format_seconds(better.token_seconds)} and not {format_seconds(worse.token_seconds)}"
            )
        other = next(
            (
                way
                for way in ways
                if way.attention != best.attention
                and (way.experts, way.replicas, way.expected_experts)
                == (best.experts, best.replicas, best.expected_experts)
            ),
            None,
        )
        if other is not None:
            yield self._why_attention(best, other)

    def _why_attention(self, best: Way, other: Way) -> str:
        sharded, replicated = (best, other) if best.attention == "sharded" else (other, best)
        saved = replicated.bound.load_seconds - sharded.bound.load_seconds
        paid = (sharded.bound.latency_seconds + sharded.bound.transfer_seconds) - (
            replicated.bound.latency_seconds + replicated.bound.transfer_seconds
        )
        return (
            f"attention {best.attention}: sharding it saves {format_seconds(saved)} of loading and takes one more "
            f"exchange a layer, {format_seconds(paid)} on {self.network.name}"
        )


def _bytes(layout: WeightLayout) -> _Bytes:
    config = layout.config
    dense = sum(page.nbytes for page in layout.pages if page.expert < 0)
    experts = sum(page.nbytes for page in layout.pages if page.expert >= 0)
    return _Bytes(dense, experts // config.routed.experts, layout.globals_bytes)


def _network(machine: Machine, network: Network | str | None) -> Network:
    if network is None and machine.network is None:
        raise BadInput(
            f"--nodes needs a --network, since machine {machine.name} has none: name one of `moesched list "
            "networks`"
        )
    if network is None:
        assert machine.network is not None
        return machine.network
    return load_network(network) if isinstance(network, str) else network


def _budget(machine: Machine, budgets: Mapping[str, int | str] | None) -> int:
    """Return the bytes that weights may take of a node's accelerator memory.

    Args:
        budgets: bytes, or texts such as "16GB", by memory; only the accelerator's memory may be named. None for its
            whole capacity.
    """
    memory = machine.accelerator.memory
    for name in budgets or {}:
        if name != memory:
            raise BadInput(f"--budget names {name!r}: with --nodes experts stay in {memory!r}, so give that")
    return read_budgets(budgets, machine).get(memory, machine.memories[memory].nbytes)
