"""Checks of the experts that a policy has each node hold and run, where several nodes share a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from moesched.errors import PolicyError

if TYPE_CHECKING:
    from moesched.steps.reservations import Declared


def require_placement(placement: Sequence[Collection[int]], nodes: int, experts: int) -> None:
    """Check that a policy's placement of experts on nodes names every expert, and fits the number of nodes.

    Args:
        placement: for each node, the numbers of its experts.
        nodes: number of nodes.
        experts: number of experts of a layer.

    Raises:
        PolicyError: `placement` is for another number of nodes, names an unknown expert, or leaves an expert out.
    """
    if len(placement) != nodes:
        raise PolicyError(
            f"place_experts: the placement is for {len(placement)} nodes, but there are {nodes}"
        )
    held = set().union(*placement)
    if strange := sorted(held.difference(range(experts))):
        raise PolicyError(f"place_experts: there is no E{strange[0]}: experts go from 0 to {experts - 1}")
    if missing := sorted(set(range(experts)) - held):
        raise PolicyError(f"place_experts: no node holds {named(missing)}: each expert needs one at least")


def require_routers(verb: str, declared: Declared) -> None:
    """Check that every node has a router if the plan requests router scores; the error names `verb`.

    Raises:
        PolicyError: the plan is centralised, and has several nodes.
    """
    if declared.scores and declared.nodes.centralised and declared.nodes.count > 1:
        raise PolicyError(
            f"{verb}: in a centralised plan only the first node has a router, and the others get no scores: "
            "omit request_scores, or place the experts without centralised=True"
        )


def ownership_problem(
    owners: Mapping[int, int], routed: Collection[int], placement: Sequence[Collection[int]]
) -> str:
    """Return the fault of an assignment of routed experts to nodes, in words; empty if there is none.

    Args:
        owners: the node of each expert.
        routed: the experts that tokens were routed to.
        placement: for each node, the experts that it holds.
    """
    if missing := sorted(set(routed) - owners.keys()):
        return f"it leaves out {named(missing)}, which tokens were routed to"
    for expert, node in owners.items():
        if expert not in routed:
            return f"no token was routed to E{expert}: omit it, or use warm_expert"
        if not 0 <= node < len(placement):
            return f"E{expert} is given to node {node}, and nodes go from 0 to {len(placement) - 1}"
        if expert not in placement[node]:
            return f"E{expert} is given to node {node}, which does not hold it"
    return ""


def named(experts: Collection[int]) -> str:
    """Return the experts as text for messages, such as "E1, E5"."""
    return ", ".join(f"E{expert}" for expert in experts)
