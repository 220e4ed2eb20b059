"""Table 6 and Fig. 8 of the Apple silicon cluster paper: the bound on speed, computed by `moesched plan --nodes`."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.machines import load_machine
from moesched.planner.cluster import plan_cluster
from moesched.reproduce.mac_cluster.paper import MacPaper
from moesched.reproduce.report import Section, Value, agrees, rounded

TABLE_6 = ("load", "compute", "latency", "transfer", "time", "tokens/s")
NODES = (2, 3, 4, 6, 8)
NETWORKS = ("10gbe", "rocev2", "infiniband")


def table_6(paper: MacPaper) -> Section:
    """Make the section of Table 6, which has our value of the paper's Eq. 1 beside each printed cell.

    Two values agree if they are equal in all printed digits.
    """
    rows: list[dict[str, Value]] = []
    for nodes, printed in paper.table_6.items():
        bound = plan_cluster(paper.model, machine="m2-ultra", nodes=int(nodes), network=paper.network).bound
        ours = [
            *map(
                _seconds,
                (
                    bound.load_seconds,
                    bound.compute_seconds,
                    bound.latency_seconds,
                    bound.transfer_seconds,
                    bound.seconds,
                ),
            ),
            f"{bound.tokens_per_second:.1f}",
        ]
        rows += [
            {"nodes": int(nodes), "cell": cell, "paper": theirs, "ours": mine, "agrees": theirs == mine}
            for cell, theirs, mine in zip(TABLE_6, printed, ours, strict=True)
        ]
    return paper.section("table-6", rows)


def figure_8(paper: MacPaper, realised: Mapping[int, float]) -> Section:
    """Make the section of Fig. 8: the bound of Eq. 1 for several network cards and numbers of nodes.

    Args:
        realised: simulated seconds per token, by number of nodes.
    """
    rows: list[dict[str, Value]] = []
    bounds = {}
    for name in NETWORKS:
        for nodes in NODES:
            proposal = plan_cluster(paper.model, machine="m2-ultra", nodes=nodes, network=name)
            bounds[name, nodes] = proposal
            per_usd = proposal.tokens_per_second_per_usd
            rows.append(
                {
                    "network": name,
                    "nodes": nodes,
                    "bound": rounded(proposal.bound.tokens_per_second),
                    "bound_per_usd": None if per_usd is None else rounded(per_usd),
                }
            )
    rows += [
        {
            "network": "10gbe, simulated",
            "nodes": nodes,
            "bound": rounded(1 / seconds),
            "bound_per_usd": rounded(1 / seconds / (nodes * (load_machine(paper.machine).price_usd or 1))),
        }
        for nodes, seconds in realised.items()
    ]
    plain = bounds["10gbe", 2]
    claims = []
    for name, share in (("rocev2", 0.05), ("infiniband", 0.20)):
        faster = bounds[name, 2]
        tokens = faster.bound.tokens_per_second
        dearer = (faster.price_usd or 0) / (plain.price_usd or 1) - 1
        claims += [
            paper.claims["faster_network"].beside(
                f"{tokens:.1f} tokens/s", agrees((16.3, 16.3), (tokens, tokens)), network=name
            ),
            paper.claims[f"dearer_{name}"].beside(f"{dearer:.0%}", agrees((share, share), (dearer, dearer))),
        ]
    return paper.section("figure-8", rows, claims)


def _seconds(seconds: float) -> str:
    text = f"{seconds:.3f}"
    return "<0.001" if text == "0.000" else text
