"""Serving on several nodes: the first one knows the requests, and the others run the rows that it names."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import moesched
from benchmarks.shared.small_runs import ONE_MEMORY
from commands import refused
from meshes import at_once, closing, mesh_of, sockets_in
from moesched.errors import BadInput, RankLost, TaskFailed, TransportError
from moesched.machines.networks import NETWORK, load_network
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.plugins import make_policy
from moesched.requests.logprobs import WantedLogprobs
from moesched.requests.rows import Row, Rows
from moesched.requests.sampling import Sampling
from moesched.runs.notices import NOTICE, Notice, pack_notice, read_notice
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import follow_on, serve_on, simulate_serving
from moesched.runs.serving import Served, Serving, ServingListener
from moesched.seams import Device, Policy
from moesched.serving.admission import FairAmongUsers
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.request import Request
from moesched.steps.plan import Plan
from moesched.system.own_loop import run_on_own_loop
from moesched.testing import Case
from moesched.testing.served_checks import check_served, random_departures, random_requests
from moesched.trace import About, Recorder, check_trace, write_trace
from moesched.transports.inproc import InprocTransport
from runs import Ended
from served_requests import (
    CAPACITY,
    LAYOUT,
    asked,
    assert_as_alone,
    mlx_device,
    stop_of,
    tokens_alone,
    torch_device,
)
from small_models import small_model

REQUESTS = asked(8, seed=3)
JOINED = replace(ONE_MEMORY, network=load_network("10gbe"))


def planned(name: str, node: int, nodes: int = 2, **settings: Any) -> tuple[Plan, Policy]:
    policy = make_policy(name, settings)
    return plan_run(JOINED, LAYOUT, CAPACITY.fullest(), policy, nodes=nodes, node=node), policy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(small_model(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> dict[int, list[int]]:
    """The tokens of each request that runs alone on one machine."""
    return tokens_alone(checkpoint, REQUESTS)


def on_nodes(
    checkpoint: Checkpoint,
    transports: Sequence[Any],
    setup: Callable[[Plan, Policy], ServingSetup],
    policy: str = "ep_balanced",
    make: Callable[[Checkpoint], Device] = torch_device,
    **settings: Any,
) -> list[Any]:
    """Serve on nodes that are threads of this process; returns the result of each, or its error."""
    nodes = len(transports)
    devices = [make(checkpoint) for _ in transports]

    def call(node: int) -> Any:
        plan, own = planned(policy, node, nodes, **settings)
        device = devices[node]
        try:
            if node:
                return follow_on(device, plan, own, transports[node])
            return serve_on(device, setup(plan, own), transport=transports[0])
        finally:
            run_on_own_loop(device.aclose)

    return at_once(*(lambda node=node: call(node) for node in range(nodes)))


@pytest.mark.parametrize(
    ("policy", "nodes", "decentralised", "make"),
    [
        ("ep_balanced", 2, True, torch_device),
        ("ep_balanced", 3, False, torch_device),
        ("ep_router_aided", 2, True, mlx_device),
        ("ep_naive", 2, False, mlx_device),
    ],
)
def test_on_several_nodes_each_request_gets_the_tokens_that_it_has_alone(
    checkpoint: Checkpoint,
    alone: dict[int, list[int]],
    policy: str,
    nodes: int,
    decentralised: bool,
    make: Callable[[Checkpoint], Device],
) -> None:
    requests = REQUESTS
    stop = stop_of(alone)

    def setup(plan: Plan, own: Policy) -> ServingSetup:
        arrivals = ListedArrivals(requests, random_departures(2, requests))
        return ServingSetup(plan, own, CAPACITY, arrivals, stop_tokens=[stop])

    transport = InprocTransport(nodes)
    serving, *steps = on_nodes(
        checkpoint, [transport] * nodes, setup, policy, make, decentralised=decentralised
    )
    assert isinstance(serving, Serving)
    assert steps == [serving.steps] * (nodes - 1)
    assert_as_alone(serving, alone, stop)


class Closes(ServingListener):
    """A listener that closes a transport with the fifth token."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._left = 5

    def token(self, served: Served) -> None:
        self._left -= 1
        if not self._left:
            run_on_own_loop(self._transport.aclose)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_ends_serving_on_all_nodes_with_the_reason(
    checkpoint: Checkpoint, tmp_path: Path, lost: int
) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as transports:

        def setup(plan: Plan, own: Policy) -> ServingSetup:
            return ServingSetup(
                plan, own, CAPACITY, ListedArrivals(REQUESTS), listener=Closes(transports[lost])
            )

        ended = on_nodes(checkpoint, transports, setup)
    assert all(isinstance(each, TaskFailed) for each in ended)
    assert isinstance(ended[1 - lost].__cause__, RankLost)
    assert f"rank {lost} is lost: it closed its transport" in str(ended[1 - lost])


def test_a_policy_that_planned_for_other_nodes_is_refused() -> None:
    plan, policy = planned("ep_balanced", 0)
    setup = ServingSetup(plan, policy, CAPACITY, ListedArrivals([]))
    with pytest.raises(BadInput, match="EpBalanced planned for 2 nodes, and 1 would serve"):
        simulate_serving(setup)


def test_a_node_that_takes_the_part_of_another_is_refused(checkpoint: Checkpoint) -> None:
    device, transport = torch_device(checkpoint), InprocTransport(2)
    setup = ServingSetup(*planned("ep_balanced", 1), CAPACITY, ListedArrivals([]))
    with pytest.raises(BadInput, match="that of node 1 of 2: node 0 calls serve_on"):
        serve_on(device, setup, transport=transport)
    with pytest.raises(BadInput, match="that of node 0 of 2: node 0 calls serve_on, the others follow_on"):
        follow_on(device, *planned("ep_balanced", 0), transport)
    run_on_own_loop(device.aclose)


@pytest.mark.parametrize("nodes", [2, 3])
def test_all_nodes_run_the_same_rows_whoever_comes_and_leaves(nodes: int) -> None:
    draw = random.Random(nodes)
    for seed in range(3):
        case = Case(name="served", machine=JOINED, nodes=nodes, layers=2, micro_batch_size=draw.randint(1, 3))
        settings = {"decentralised": draw.random() < 0.5}
        policies = [make_policy("ep_balanced", settings) for _ in range(nodes)]
        fullest = case.capacity.fullest()
        first, *peers = [(case.plan(each, node, fullest), each) for node, each in enumerate(policies)]
        check_served(first[1], first[0], case.capacity, random_requests(seed, 5, 6), seed, peers)


def simulated(requests: Sequence[Request], *, nodes: int = 2, **options: Any) -> Serving:
    (plan, policy), *others = [planned("ep_balanced", node, nodes) for node in range(nodes)]
    setup = ServingSetup(plan, policy, CAPACITY, ListedArrivals(requests), FairAmongUsers())
    return simulate_serving(setup, peers=[Rank(*each) for each in others], **options)


def test_the_rows_of_a_step_travel_while_the_step_before_ends() -> None:
    ended = Ended()
    serving = simulated([Request(number=0, prompt=9, new_tokens=12)], observers=[ended])
    notices = [task for task in ended.tasks if task.verb == NOTICE]
    assert len(notices) == serving.steps + 1
    exchanges = [task for task in ended.tasks if task.lane.name == NETWORK and task.verb != NOTICE]
    for notice in notices[1:-1]:
        last = max(task.end for task in exchanges if task.step == notice.step - 1)
        assert notice.start == last


def test_nodes_are_told_that_nobody_asks_before_the_first_one_waits() -> None:
    ended = Ended()
    requests = [Request(number=number, prompt=9, new_tokens=2, arrives=number * 10**9) for number in range(3)]
    serving = simulated(requests, observers=[ended])
    waits = [task.start for task in ended.tasks if task.verb == "wait"]
    notices = sum(task.verb == NOTICE for task in ended.tasks)
    assert len(waits) == 2
    assert notices == serving.steps + len(waits) + 1
    assert serving.requests[2].ending == "length"


def test_a_trace_shows_the_notices_of_all_nodes(tmp_path: Path) -> None:
    recorder = Recorder()
    simulated(asked(4), recorder=recorder)
    write_trace(tmp_path / "trace.json", recorder.recording(), About(driver="virtual"))
    assert check_trace(tmp_path / "trace.json") == []


NOTICES: list[Notice] = [
    None,
    {},
    {
        0: Rows(
            "decode", (Row(7, 4, 1, sampling=Sampling(temperature=0.5, seed=3), cache_tokens=32),), (5, 6)
        ),
        2: Rows("prefill", (Row(8, 0, 2, ids=[1, 2], logprobs=WantedLogprobs(3, prompt=True)),)),
    },
]


@pytest.mark.parametrize("notice", NOTICES)
def test_a_notice_is_read_as_it_was_given(notice: Notice) -> None:
    assert read_notice(pack_notice(notice)) == notice


NO_PHASE: Any = {0: ("x", (), ())}


@pytest.mark.parametrize("data", [b"", b"\x01", pack_notice(NOTICES[2])[:-1], pack_notice(NO_PHASE)])
def test_bytes_that_are_no_notice_are_refused(data: bytes) -> None:
    with pytest.raises(TransportError, match=f"{len(data)} bytes are not the rows of a step: "):
        read_notice(data)


SIMULATED: dict[str, Any] = {
    "model": "mixtral-0.8b", "machine": "m2-ultra", "workload": "uniform", "network": "10gbe",
    "arrivals": "poisson:20", "requests": 3, "gen": 3, "batch_size": 2,
}  # fmt: skip


def test_arrivals_are_predicted_on_several_machines_with_the_time_of_their_exchanges() -> None:
    two = moesched.simulate_arrivals(**SIMULATED, policy="ep_balanced", nodes=2)
    assert (two.requests, two.left, two.nodes) == (3, 0, 2)
    slow = moesched.simulate_arrivals(
        **SIMULATED | {"network": replace(load_network("10gbe"), latency_seconds=0.01)},
        policy="ep_balanced",
        nodes=2,
    )
    assert slow.tpot is not None
    assert two.tpot is not None
    layers = 8
    assert slow.tpot.p50 - two.tpot.p50 >= layers * 0.009


def test_the_command_names_the_nodes(command: Any) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIMULATED.items()]
    said = command("simulate", *options, "--policy", "ep_balanced", "--nodes", 2)
    assert said.code == 0
    assert "on 2 nodes of m2-ultra, ep_balanced, predicted" in said.out
    refused(
        command("simulate", *options, "--policy", "resident", "--nodes", 2), re.escape("such as ep_balanced")
    )
