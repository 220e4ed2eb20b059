"""Eq. 1 of the Apple silicon cluster paper: Fig. 8, and what `plan --nodes` makes of the equation.

test_reproduce_mac_cluster.py holds Table 6 against it, to the digit.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moesched.machines import load_machine
from moesched.machines.changes import changed
from moesched.machines.networks import load_network
from moesched.planner.cluster import ClusterProposal, plan_cluster


def cluster(nodes: int, network: str = "10gbe", **more: object) -> ClusterProposal:
    return plan_cluster("dbrx", machine="m2-ultra", nodes=nodes, network=network, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("network", "throughput"), [("rocev2", 16.15), ("infiniband", 16.30)])
def test_figure_8_with_faster_cards(network: str, throughput: float) -> None:
    assert cluster(2, network).bound.tokens_per_second == pytest.approx(throughput, abs=0.01)


def test_faster_cards_cost_what_the_paper_says() -> None:
    plain, roce, infiniband = (
        cluster(2, network).price_usd or 0 for network in ("10gbe", "rocev2", "infiniband")
    )
    assert plain == 2 * 6599
    assert f"{5.9 / plain:.6f}" == "0.000447", "Table 5: 5.9 tokens for two machines"
    assert roce / plain == pytest.approx(1.05, abs=0.005)
    assert infiniband / plain == pytest.approx(1.19, abs=0.005)
    proposal = cluster(4, "rocev2")
    per_usd = proposal.bound.tokens_per_second / (4 * (6599 + 339))
    assert proposal.tokens_per_second_per_usd == pytest.approx(per_usd)


def test_a_machine_has_no_throughput_per_dollar_without_a_price_and_its_own_network_by_default() -> None:
    machine = msgspec.structs.replace(
        load_machine("m2-ultra"), price_usd=None, network=load_network("rocev2")
    )
    proposal = plan_cluster("dbrx", machine=machine, nodes=2)
    assert (proposal.network, proposal.price_usd, proposal.tokens_per_second_per_usd) == (
        "rocev2",
        None,
        None,
    )


def test_the_optimisers_placement_raises_the_bound_at_the_same_memory() -> None:
    budget = {"unified": "140GB"}
    authors = cluster(4, budgets=budget)
    balanced = cluster(4, budgets=budget, policy="ep_balanced")
    assert authors.experts_that_fit == balanced.experts_that_fit == 8
    assert balanced.expected_experts <= 1.1605
    assert f"{balanced.bound.tokens_per_second:.1f}" == "13.6"


def test_ethernet_keeps_attention_on_every_node_and_rdma_shards_it() -> None:
    assert cluster(2, "10gbe").choice.best.attention == "replicated"
    assert cluster(2, "infiniband").choice.best.attention == "sharded"


def test_memory_for_replicas_decides_whether_experts_are_cut() -> None:
    raised = changed(load_machine("m2-ultra"), ["memory.unified.reserved=8GB"])
    roomy = plan_cluster("dbrx", machine=raised, nodes=4, network="10gbe")
    tight = cluster(4, budgets={"unified": "80GB"})
    assert roomy.choice.best.experts == "whole"
    assert roomy.choice.best.replicas > 2
    assert tight.choice.best.experts == "cut"
    assert tight.choice.runs.policy in ("ep_router_aided", "ep_balanced")
    assert all(way.bytes_per_node <= 80e9 for way in tight.ways)


def test_the_choice_says_why() -> None:
    [replicas, experts, attention] = cluster(4).choice.why
    assert "9 of 16 experts" in replicas
    assert "cutting them reads 1 experts' weights a layer" in experts
    assert "41.6 ms on 10gbe" in attention


def test_one_node_exchanges_nothing() -> None:
    proposal = plan_cluster("mixtral-8x7b", machine="m2-ultra", nodes=1, network="10gbe")
    assert proposal.bound.latency_seconds == proposal.bound.transfer_seconds == 0
    assert proposal.expected_experts == 2
    assert proposal.placement == [list(range(8))]


def test_plan_prints_the_bound_and_the_choice(command: Any) -> None:
    plan = ("plan", "--model", "dbrx", "--machine", "m2-ultra", "--nodes", 4, "--network", "10gbe")
    told = command(*plan, "--json").json
    seconds = {f"{part}_seconds" for part in ("load", "compute", "latency", "transfer")}
    assert told["bound"].keys() >= seconds | {"tokens_per_second"}
    assert told["expected_experts"] == pytest.approx(1.569, abs=1e-3)
    assert [len(held) for held in told["placement"]] == [8, 8, 8, 8]
    out = command(*plan).out
    for text in ("12.27", "26,396 USD", "Best: experts cut, attention replicated.", "ep_balanced"):
        assert text in out
