"""What the policies for several nodes share: the paper's placement, and which experts were used longest ago."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from moesched.plan import Plan
from moesched.step import Step

HALVES = 2


def mirrored_halves(experts: int, nodes: int) -> tuple[range, ...]:
    """The authors' placement: the nodes hold the first and the second half of the experts in turn.

    Where one node is too few to hold a half, which is where there is one only, it holds all.
    """
    if nodes < HALVES:
        return (range(experts),)
    middle = -(-experts // HALVES)
    halves = range(middle), range(middle, experts)
    return tuple(halves[node % HALVES] for node in range(nodes))


def plan_nodes(plan: Plan, placement: Sequence[Collection[int]], *, decentralised: bool) -> None:
    """Place the experts, and everything else beside them."""
    if not decentralised:
        plan.centralise()
    plan.place_experts(placement)
    plan.limit_in_flight(2)
    plan.place_kv("accelerator")


def embed_all(step: Step) -> None:
    """Look up the embeddings, where this node does that."""
    if step.attends:
        for j in step.micro_batches:
            step.embed(j)


def attend(step: Step, i: int, j: int) -> None:
    """A micro-batch's attention, where this node attends."""
    if step.attends:
        step.pre_attention(i, j)
        step.attention(i, j)


def spread(routed: Iterable[int], placement: Sequence[Collection[int]]) -> dict[int, int]:
    """Each routed expert to one of the nodes that hold it: to that with the fewest so far, the first one of several."""
    counts = [0] * len(placement)
    owners = {}
    for expert in routed:
        holders = [node for node, held in enumerate(placement) if expert in held]
        owners[expert] = node = min(holders, key=counts.__getitem__)
        counts[node] += 1
    return owners


def run_own(step: Step, i: int, j: int, owners: Mapping[int, int]) -> list[int]:
    """Say who runs what, and run this node's share; returns which experts those are."""
    step.assign(i, j, owners)
    own = [expert for expert, node in owners.items() if node == step.node]
    for expert in own:
        step.run_expert(i, expert, j)
    return own


class LeastRecent:
    """The experts that a node holds, those that were used longest ago first, in whichever layer that was.

    An expert's weights of all layers lie together in memory (section 4.1 of the paper), so that any layer's use counts.
    """

    def __init__(self, held: Iterable[int]) -> None:
        self._order = dict.fromkeys(sorted(held))

    def use(self, experts: Iterable[int]) -> None:
        """These are used now, one after the other."""
        for expert in experts:
            del self._order[expert]
            self._order[expert] = None

    def first(self, count: int, without: Collection[int] = ()) -> list[int]:
        """The `count` experts that were used longest ago, or as many as there are, without these."""
        return [expert for expert in self._order if expert not in without][: max(0, count)]
