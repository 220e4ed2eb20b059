"""Comparison of our policy `ep_balanced` with the best version of the system in the Apple silicon cluster paper."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from moesched.machines import load_machine
from moesched.machines.networks import load_network
from moesched.machines.sustained import at_peak
from moesched.reproduce.mac_cluster.paper import MacPaper
from moesched.reproduce.mac_cluster.runs import mac_of, run_request
from moesched.reproduce.report import Section, Value, rounded

HELD = 8
"""Experts that each of the authors' nodes holds."""
NODES = range(2, 9)
LOOKED_AT = 32
"""Generated tokens over which policies are compared."""


def balanced(paper: MacPaper, on_progress: Callable[[str], None]) -> Section:
    """Make the section that compares `ep_balanced` with P-LR-D, the authors' best version."""
    rows: list[dict[str, Value]] = []
    template = paper.systems[-1]
    for name in ("m2-ultra", paper.machine):
        for nodes in NODES:
            on_progress(f"ep_balanced on {nodes} x {name}")
            machine = mac_of(paper, replace(template, nodes=nodes))
            if name == "m2-ultra":
                machine = replace(at_peak(load_machine(name)), network=load_network(paper.network))
            runs = [("ep_router_aided", {}), ("ep_balanced", {"experts": HELD}), ("ep_balanced", {})]
            router, held, all_memory = (
                1 / run_request(machine, paper, policy, settings, nodes, 16, LOOKED_AT).token.total
                for policy, settings in runs
            )
            rows.append(
                {
                    "machine": name,
                    "nodes": nodes,
                    "ep_router_aided": rounded(router),
                    "ep_balanced": rounded(held),
                    "ratio": round(held / router, 4),
                    "with_all_memory": rounded(all_memory),
                    "ratio_with_all_memory": round(all_memory / router, 4),
                }
            )
    return paper.section("balanced", rows)
