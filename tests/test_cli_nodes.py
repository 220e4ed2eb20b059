"""`moesched simulate --nodes`: what is predicted of several machines, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import ONLY_FIGURES, refused
from moesched.trace import check_trace, read_trace

pytestmark = pytest.mark.usefixtures("as_users_run")

DBRX = ("simulate", "--model", "dbrx", "--workload", "uniform")
ONE = ("--batch-size", 1, "--gen", 2)
ETHERNET = ("--network", "10gbe")


def tokens_per_second(command: Any, policy: str, nodes: int, *options: object, gen: int = 2) -> float:
    of = ("--batch-size", 1, "--gen", gen, "--policy", policy, "--nodes", nodes)
    machine = () if "--machine" in options else ("--machine", "m2-ultra")
    said = command(*DBRX, *machine, *ETHERNET, *of, *options, *ONLY_FIGURES, "--json")
    assert (said.code, said.err) == (0, "")
    rate: float = said.json["decode_tokens_per_second"]
    return rate


def test_nodes_that_share_experts_exchange_once_a_layer(command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ("--policy", "ep_router_aided", "--nodes", 2, "--trace", trace, "--json")
    said = command(*DBRX, "--machine", "m2-ultra", *ONE, *ETHERNET, *options)
    assert (said.code, said.json["nodes"]) == (0, 2)
    assert said.json["lanes"]["network"]["busy_seconds"] >= 2 * 40 * 1e-3
    assert said.json["peak_bytes"]["unified"] <= 192e9
    assert check_trace(trace) == []
    assert {each.lane.rank for each in read_trace(trace).recording.slices} == {0, 1}


def test_the_paper_s_versions_come_in_its_order(command: Any) -> None:
    central = tokens_per_second(command, "ep_router_aided", 2, "--set", "decentralised=false")
    busy, aided = (tokens_per_second(command, policy, 2) for policy in ("ep_busy_full", "ep_router_aided"))
    assert busy < central < aided


def test_overlapping_placements_are_faster_with_the_same_memory(command: Any) -> None:
    theirs = tokens_per_second(command, "ep_router_aided", 4, gen=3)
    ours = tokens_per_second(command, "ep_balanced", 4, "--set", "experts=8", gen=3)
    assert ours > 1.05 * theirs


def test_copies_that_nobody_needs_stay_wired(command: Any) -> None:
    """With eleven experts on each of four nodes, every node runs one a layer: none has to wait for another."""
    machine = ("--machine", "m2-ultra-macos14")
    assert tokens_per_second(command, "ep_balanced", 4, *machine, gen=12) > 7


def test_a_node_uses_one_accelerator(command: Any) -> None:
    wanted = "simulate --model mixtral-8x7b --machine t4x2 --workload uniform --nodes 2 --network 10gbe"
    refused(command(*wanted.split(), "--policy", "ep_naive"), "use --tensor-parallel 1")
