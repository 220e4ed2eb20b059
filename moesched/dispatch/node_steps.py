"""Building blocks of expert-parallel policies: a base class, and functions that run or warm a node's experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from moesched.dispatch.node_placement import Placement, mirrored
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class NodeExperts(ABC):
    """Base of expert-parallel policies, which run layer by layer, and in each layer one micro-batch after the other.

    Settings:
        decentralised: whether every node computes attention, routing and the sums of expert outputs, with one exchange
            per layer; otherwise only the first node does, with two exchanges.
    """

    expert_parallel = True

    def __init__(self, decentralised: bool = True) -> None:
        self.decentralised = decentralised

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(2)
        plan.place_kv("accelerator")
        self.placement = self.choose_placement(plan)
        plan.place_experts(self.placement, centralised=not self.decentralised)

    def choose_placement(self, plan: Plan) -> Placement:
        """Return the experts that each node holds in every layer.

        By default, as in the Apple silicon cluster paper, nodes with even numbers hold one half of the experts, and
        nodes with odd numbers the other half.
        """
        return mirrored(plan.layout.config.routed.experts, plan.nodes.count)

    async def prefill(self, step: Step) -> None:
        if step.attends:
            for j in step.micro_batches:
                step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                if step.attends:
                    step.pre_attention(i, j)
                    step.attention(i, j)
                self.run_experts(step, i, j, await step.route(i, j))
                step.combine(i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    @abstractmethod
    def run_experts(self, step: Step, i: int, j: int, routed: Mapping[int, int]) -> None:
        """Assign the experts that micro-batch j chose in layer i to nodes, and run this node's share.

        routed: number of tokens of the micro-batch that chose each expert.
        """


def experts_per_node(plan: Plan, *, centralised: bool) -> int:
    """Return the number of experts per layer that fit on the first node, which has the least free memory.

    centralised: whether only the first node computes attention and routing.

    Raises:
        OverBudget: the first node has no room for its dense weights, KV cache and activations.
    """
    first = replace(plan.nodes, index=0, centralised=centralised)
    dense, expert = plan.layout.dense, plan.layout.expert
    beside = sum(plan.slot_bytes(page) for i in plan.layers for page in dense(i))
    each = sum(plan.slot_bytes(page) for i in plan.layers for page in expert(i, 0))
    free = plan.free("accelerator", given=replace(plan.declared, nodes=first))
    return max(0, free - beside) // each


def run_own(step: Step, i: int, j: int, owners: Mapping[int, int]) -> list[int]:
    """Submit the assignment of micro-batch j's experts in layer i, run this node's share, and return the experts run.

    owners: the assignment: the node that runs each chosen expert.
    """
    step.assign(i, j, owners)
    own = [expert for expert, node in owners.items() if node == step.node]
    for expert in own:
        step.run_expert(i, expert, j)
    return own


def warm_spare(
    step: Step,
    i: int,
    j: int,
    owners: Mapping[int, int],
    own: Sequence[int],
    recent: LeastRecent,
    idle: Sequence[int] = (),
) -> None:
    """Warm least recently used experts: run each on a row of zeros, so the GPU's driver keeps its weights in memory.

    With the warmed experts, this node runs as many experts as the busiest node, for which it has to wait anyway.

    Args:
        owners: the node that runs each chosen expert.
        own: chosen experts that this node runs.
        recent: this node's experts in LRU order, updated by this call.
        idle: experts that are warmed even if this node does not have to wait.
    """
    quota = max(Counter(owners.values()).values(), default=0)
    spare = recent.first(quota - len(own), without=own)
    spare += [expert for expert in idle if expert not in spare and expert not in own]
    for expert in spare:
        step.warm_expert(i, expert, j)
    recent.use([*own, *spare])


class LeastRecent:
    """The experts that a node holds, the least recently used first; a use in any layer counts.

    Layers are not distinguished, since the weights of an expert in all layers are contiguous in memory (section 4.1 of
    the Apple silicon cluster paper).
    """

    def __init__(self, held: Iterable[int]) -> None:
        self._layers = 0
        self._last_use = dict.fromkeys(sorted(held), 0)

    def use(self, experts: Iterable[int]) -> None:
        """Record that a layer uses these experts; the last one becomes the most recently used."""
        self._layers += 1
        for expert in experts:
            del self._last_use[expert]
            self._last_use[expert] = self._layers

    def first(self, count: int, without: Collection[int] = ()) -> list[int]:
        """Return up to `count` least recently used experts that are not in `without`."""
        return [expert for expert in self._last_use if expert not in without][: max(0, count)]

    def idle_for(self, layers: int) -> list[int]:
        """Return the experts that none of the last `layers` layers used."""
        return [expert for expert, last in self._last_use.items() if self._layers - last >= layers]
