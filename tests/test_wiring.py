"""Weights that a driver unwires when they lie idle: when that costs time, how much, and what keeps them wired."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from moesched.drivers.wired_memory import WiredPages
from moesched.machines import Machine, WiredMemory, load_machine, parse_machine
from moesched.machines.networks import load_network
from moesched.machines.toml_text import machine_toml
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.reproduce.mac_cluster.wired_memory import sample_seconds
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.seams import Observer
from runs import Ended

MS = 1_000_000
WIRING = WiredMemory(idle_seconds=0.5, first_bandwidth=1e9, again_bandwidth=2e9)


def machine(**changes: object) -> Machine:
    """The simulated Mac on a quick network."""
    mac = load_machine("m2-ultra-macos14")
    assert mac.wired_memory is not None
    wired_memory = msgspec.structs.replace(mac.wired_memory, **changes)
    return msgspec.structs.replace(mac, wired_memory=wired_memory, network=load_network("infiniband"))


def step_seconds(
    mac: Machine,
    policy: str,
    nodes: int = 2,
    new_tokens: int = 5,
    observers: Sequence[Observer] = (),
    **settings: bool,
) -> list[float]:
    """Of one request with a small model, prefill first."""
    layout, batch = weight_layout(SHAPES["mixtral-0.8b"]), split_batch([4], new_tokens, 1)
    made = [make_policy(policy, settings) for _ in range(nodes)]
    plans = [plan_run(mac, layout, batch, each, nodes=nodes, node=node) for node, each in enumerate(made)]
    first, *peers = (Rank(plan, each) for plan, each in zip(plans, made, strict=True))
    return simulate(first.plan, first.policy, observers=observers, peers=peers).step_seconds


def on_five_nodes() -> str:
    """All tasks and their times."""
    ran = Ended()
    step_seconds(machine(), "ep_router_aided", nodes=5, new_tokens=3, observers=[ran])
    return str([(task.verb, task.step, task.layer, task.expert, task.start, task.end) for task in ran.tasks])


def test_the_virtual_clock_does_not_know_how_python_hashes() -> None:
    program = [sys.executable, "-c", "from test_wiring import on_five_nodes; print(on_five_nodes(), end='')"]
    environment = os.environ | {"PYTHONHASHSEED": "2"}
    there = subprocess.run(
        program, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout == on_five_nodes()


@pytest.mark.parametrize(("later", "wired"), [(500 * MS, 0), (500 * MS + 1, 500)])
def test_an_array_is_wired_again_by_its_bytes_only_if_it_lay_idle(later: int, wired: int) -> None:
    memory = WiredPages(WIRING)
    memory.use(("a",), 0)
    assert memory.wire(("a",), 1000, later) == wired


def test_with_standby_arrays_are_wired_when_the_first_request_comes_and_only_then() -> None:
    memory = WiredPages(WIRING)
    assert memory.wire(("a",), 1000, 9000 * MS) == 0
    assert memory.wire(("b",), 1000, 9400 * MS) == 0
    assert memory.wire(("c",), 1000, 9600 * MS) == 500


def test_without_standby_the_first_use_wires_at_the_first_rate() -> None:
    memory = WiredPages(msgspec.structs.replace(WIRING, standby=False))
    assert memory.wire(("a",), 1000, 0) == 1000


def test_wiring_makes_a_step_longer_by_what_lay_idle() -> None:
    never = step_seconds(machine(idle_seconds=1e9), "ep_naive")
    always = step_seconds(machine(idle_seconds=1e-9), "ep_naive")
    config = SHAPES["mixtral-0.8b"]
    expert = 3 * config.hidden * config.routed.intermediate * 2
    longer = always[-1] - never[-1]
    assert longer > config.layers * expert / 100e9


def test_prestacked_weights_stay_wired_by_any_layers_use() -> None:
    step = step_seconds(machine(idle_seconds=1e9), "ep_busy_full")[-1]
    idle = step / 2  # less than from one token to the next, more than from layer to layer
    stacked = step_seconds(machine(idle_seconds=idle), "ep_busy_full")[-1]
    apart = step_seconds(machine(idle_seconds=idle, prestacked=False), "ep_busy_full")[-1]
    assert stacked < apart


def test_balanced_experts_touch_idle_ones_only_where_wiring_decays() -> None:
    plain = msgspec.structs.replace(machine(), wired_memory=None)
    for mac, warmed in ((machine(), True), (plain, False)):
        layout, batch = weight_layout(SHAPES["mixtral-0.8b"]), split_batch([4], 9, 1)
        made = [make_policy("ep_balanced", {"experts": 3}) for _ in range(4)]
        plans = [plan_run(mac, layout, batch, each, nodes=4, node=node) for node, each in enumerate(made)]
        first, *peers = (Rank(plan, each) for plan, each in zip(plans, made, strict=True))
        seen = Ended()
        simulate(first.plan, first.policy, peers=peers, observers=[seen])
        assert ("warm_expert" in {task.verb for task in seen.tasks}) == warmed


@pytest.mark.parametrize(
    ("wait_ms", "prestacked", "wired"),
    [(8, False, True), (16, False, False), (512, True, True), (1024, True, False)],
)
def test_the_papers_findings_come_out_of_one_idle_time(wait_ms: int, prestacked: bool, wired: bool) -> None:
    """Section 3.2, Algorithm 2: a sample takes longer from 8 and 512 ms of waiting on."""
    wired_memory = machine().wired_memory
    assert wired_memory is not None
    alone = sample_seconds(wired_memory, 0, prestacked=prestacked)
    assert (sample_seconds(wired_memory, wait_ms / 1000, prestacked=prestacked) < 1.1 * alone) == wired


def test_a_machine_is_written_with_its_wiring() -> None:
    mac = load_machine("m2-ultra-macos14")
    assert parse_machine(machine_toml(mac).encode(), "written") == mac
