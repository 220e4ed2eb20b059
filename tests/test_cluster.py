"""Nodes that are processes, over ZeroMQ with CURVE: they give one process's tokens, and no fault makes them hang."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from _forked_nodes import ForkedProcess, ForkServer, Killer
from structlog.testing import capture_logs

import moesched
from clusters import LAUNCHER, cluster, host
from commands import refused
from meshes import free_port
from moesched.cluster.cluster_file import Cluster, cluster_toml
from moesched.cluster.cluster_jobs import run_cluster, run_local
from moesched.cluster.control import Control
from moesched.cluster.curve.keys import SECRET_NAME, make_keys, write_keys
from moesched.cluster.messages import JoinRequest, Quit, Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput, NodeLost
from moesched.runs.listeners import Listener
from moesched.trace import read_trace
from patience import PATIENCE_SECONDS
from small_models import SMALL, small_model

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], [4, 5], [6]]
NEW_TOKENS = 6
TIMEOUT_SECONDS = 60.0
"""Of an exchange, and of joining: whoever waits for that long was told of nothing."""
MIXTRAL = msgspec.structs.replace(SMALL, layers=2, name="mixtral")
DBRX = msgspec.structs.replace(
    MIXTRAL, form="dbrx", transposed_down=True, norm="layer", experts=5, top_k=2, name="dbrx"
)


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return ForkServer()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    for config in (MIXTRAL, DBRX):
        small_model(folder / config.name, config=config)
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, list[list[int]]]:
    """Tokens that one process generates."""
    return {
        name: moesched.run_model(
            models / name, PROMPTS, policy="resident", max_new_tokens=NEW_TOKENS, batch_size=3
        ).tokens
        or []
        for name in ("mixtral", "dbrx")
    }


@pytest.mark.parametrize(
    ("model", "policy", "nodes", "settings"),
    [
        ("mixtral", "ep_router_aided", 2, {}),
        ("mixtral", "ep_naive", 2, {}),
        ("dbrx", "ep_busy_full", 2, {}),
        ("dbrx", "ep_balanced", 3, {"experts": 3}),
    ],
)
def test_processes_give_the_tokens_of_one(
    server: ForkServer,
    models: Path,
    expected: dict[str, list[list[int]]],
    model: str,
    policy: str,
    nodes: int,
    settings: dict[str, Any],
) -> None:
    report = run_local(
        models / model,
        PROMPTS,
        nodes=nodes,
        start=server,
        policy=policy,
        settings=settings,
        max_new_tokens=NEW_TOKENS,
    )
    assert report.tokens == expected[model]
    assert [member.lost for member in report.members] == [None] * nodes
    assert report.epochs == 1


def test_one_node_alone_runs_any_policy(
    server: ForkServer, models: Path, expected: dict[str, list[list[int]]]
) -> None:
    arguments: dict[str, Any] = {"policy": "layer_streaming", "max_new_tokens": NEW_TOKENS}
    assert run_local(models / "dbrx", PROMPTS, nodes=1, start=server, **arguments).tokens == expected["dbrx"]


def test_weights_that_change_on_the_nodes_are_the_failure_of_the_run(
    server: ForkServer, tmp_path: Path
) -> None:
    model = small_model(tmp_path / "model", config=MIXTRAL)
    (weights,) = model.glob("*.safetensors")

    class Appends(Listener):
        def generated(self, request: int, token: int, text: str) -> None:
            with weights.open("ab") as file:
                file.write(b"more")

    given: dict[str, Any] = {"policy": "ep_naive", "max_new_tokens": NEW_TOKENS, "listener": Appends()}
    report = run_local(model, PROMPTS, nodes=2, start=server, **given)
    assert report.tokens is not None
    assert any(report.tokens)
    assert report.failure is not None
    assert report.failure.startswith(f"{weights} was changed from ")
    assert "the tokens of requests 0 to 2 may be wrong" in report.failure


def test_all_nodes_stand_in_one_trace_on_one_clock(server: ForkServer, models: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run_local(
        models / "mixtral",
        PROMPTS,
        nodes=2,
        start=server,
        policy="ep_router_aided",
        max_new_tokens=3,
        batch_size=2,
        trace=trace,
    )
    for file in (trace, tmp_path / "trace.batch2.json"):
        assert moesched.check_trace(file) == []
        found = read_trace(file)
        for clock in found.about.clocks.values():
            assert abs(clock.ahead) <= clock.error  # they read the same clock
        spans: dict[int, dict[int, tuple[int, int]]] = {}
        for each in found.recording.slices:
            if each.ticket >= 0:
                spans.setdefault(each.ticket, {})[each.lane.rank] = (each.start, each.end)
        error = 2 * sum(clock.error for clock in found.about.clocks.values())
        for parts in spans.values():
            (start, end), (other_start, other_end) = parts[0], parts[1]
            assert start <= other_end + error and other_start <= end + error


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("number", range(10))
def test_whoever_is_killed_whenever_the_run_ends_in_time_with_the_same_tokens_or_an_error(
    server: ForkServer, models: Path, expected: dict[str, list[list[int]]], number: int
) -> None:
    draw = random.Random(number)
    nodes = draw.choice([2, 3, 4])
    rank = draw.randrange(nodes)
    killer = Killer(
        draw.randint(1, len(PROMPTS) * (NEW_TOKENS - 1)), lambda: server.nodes[rank].process.kill()
    )
    replicated = nodes == 4 or (nodes == 3 and rank != 1)
    try:
        report = run_local(
            models / "mixtral",
            PROMPTS,
            nodes=nodes,
            start=server,
            policy=draw.choice(["ep_router_aided", "ep_naive"]),
            max_new_tokens=NEW_TOKENS,
            listener=killer,
        )
    except NodeLost as error:
        assert not replicated
        assert error.rank == rank
        assert f"node {rank} (local-{rank}) is lost" in str(error)
        kept = error.report.tokens
        assert all(whole[: len(part)] == part for whole, part in zip(expected["mixtral"], kept, strict=True))
    else:
        assert replicated
        assert report.tokens == expected["mixtral"]
        assert report.epochs == 2
        assert report.members[rank].lost is not None
    assert time.monotonic() - killer.since < TIMEOUT_SECONDS
    assert all(node.process.exitcode is not None for node in server.nodes.values())


def test_the_last_of_two_that_hold_everything_goes_on_alone(
    server: ForkServer, models: Path, expected: dict[str, list[list[int]]]
) -> None:
    killer = Killer(5, lambda: server.nodes[0].process.kill())
    report = run_local(
        models / "dbrx",
        PROMPTS,
        nodes=2,
        start=server,
        policy="ep_balanced",
        max_new_tokens=NEW_TOKENS,
        listener=killer,
    )
    assert report.tokens == expected["dbrx"]
    assert [member.lost is None for member in report.members] == [False, True]


def test_a_node_that_comes_back_takes_part_again(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    file, _ = seated
    arguments = ["node", str(models / "mixtral"), "--cluster", str(file), "--rank", "0"]

    def act() -> None:
        server.nodes[0].process.kill()
        server.start(0, arguments, file.parent / "back.err")

    more = {"policy": "policies_for_tests:Unhurried", "max_new_tokens": 150}
    alone = moesched.run_model(
        models / "mixtral", PROMPTS, policy="resident", max_new_tokens=150, batch_size=3
    )
    report = run_seated(file, server, models / "mixtral", listener=Killer(30, act), **more)
    assert report.tokens == alone.tokens
    assert report.epochs == 3
    assert [member.lost for member in report.members] == [None, None]
    assert server.nodes[0].wait(PATIENCE_SECONDS) == 0


def test_two_lost_at_once_are_no_trouble_where_others_hold_their_experts(
    server: ForkServer, models: Path, expected: dict[str, list[list[int]]]
) -> None:
    def act() -> None:
        server.nodes[0].process.kill()
        server.nodes[3].process.kill()

    killer = Killer(5, act)
    report = run_local(
        models / "mixtral",
        PROMPTS,
        nodes=4,
        start=server,
        policy="ep_router_aided",
        max_new_tokens=NEW_TOKENS,
        listener=killer,
    )
    assert report.tokens == expected["mixtral"]
    assert [member.lost is None for member in report.members] == [False, True, True, False]
    assert time.monotonic() - killer.since < TIMEOUT_SECONDS


# ---------------------------------------------------------------- cluster files


@pytest.fixture
def seated(tmp_path: Path) -> Iterator[tuple[Path, Cluster]]:
    """A cluster file of two nodes on this machine, with the keys beside it."""
    hosts = []
    for rank in range(2):
        keys = write_keys(tmp_path / f"keys-{rank}")
        hosts.append(host(rank, key=keys.public, port=0, secret=f"keys-{rank}/{SECRET_NAME}"))
    write_keys(tmp_path / "launcher", LAUNCHER)
    file = tmp_path / "cluster.toml"
    described = msgspec.structs.replace(cluster(*hosts, port=free_port()), lost_after=PATIENCE_SECONDS)
    file.write_text(cluster_toml(described))
    yield file, described


def run_seated(file: Path, server: ForkServer, model: Path, **more: Any) -> Any:
    arguments: dict[str, Any] = {"policy": "ep_router_aided", "max_new_tokens": NEW_TOKENS} | more
    return run_cluster(
        model,
        PROMPTS,
        cluster_file=file,
        key=file.parent / "launcher" / SECRET_NAME,
        start=server(file.parent),
        **arguments,
    )


def test_a_node_that_stands_still_is_lost_after_the_time_that_the_file_says(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    killer = Killer(4, lambda: os.kill(server.nodes[1].process.pid or 0, signal.SIGSTOP))
    file, described = seated
    file.write_text(cluster_toml(msgspec.structs.replace(described, lost_after=3.0)))
    with pytest.raises(NodeLost, match="silent for 3 s"):
        run_seated(file, server, models / "mixtral", listener=killer)
    assert time.monotonic() - killer.since < TIMEOUT_SECONDS
    assert server.nodes[1].process.exitcode is not None


def first_node(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> tuple[Control, ForkedProcess, Any]:
    """A launcher's control channel, a node that wants to join, and what it says."""
    file, described = seated
    control = Control(
        "127.0.0.1", described.launcher.port, LAUNCHER, {each.key: each.name for each in described.hosts}
    )
    arguments = ["node", str(models / "mixtral"), "--cluster", str(file), "--rank", "0"]
    node = server.start(0, arguments, file.parent / "err")
    while not (heard := list(control.hear(5))):
        pass
    return control, node, heard[0]


def test_a_node_ends_when_its_launcher_is_gone(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    control, node, joined = first_node(seated, server, models)
    assert isinstance(joined.message, JoinRequest)
    control.say(joined.peer, Welcome(run=NodeRun(policy="ep_naive"), lost_after=0.5, transport="zeromq"))
    control.close()
    assert node.wait(PATIENCE_SECONDS) == 1
    assert "is gone" in node.last_words()


class StandingDevice(TorchDevice):
    """Leaves a file where it stood by."""

    def __init__(self, checkpoint: Any, layout: Any, file: str = "") -> None:
        super().__init__(checkpoint, layout)
        self._file = Path(file)

    def stand_by(self) -> None:
        self._file.touch()


def test_the_device_of_a_node_that_waits_for_something_to_do_stands_by(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path, tmp_path: Path
) -> None:
    stood = tmp_path / "stood by"
    control, node, joined = first_node(seated, server, models)
    run = NodeRun(
        policy="ep_naive", device="test_cluster:StandingDevice", device_settings={"file": str(stood)}
    )
    control.say(joined.peer, Welcome(run=run, lost_after=PATIENCE_SECONDS, transport="zeromq"))
    while not stood.exists():
        list(control.hear(0.01))
    control.say(joined.peer, Quit())
    code = node.wait(PATIENCE_SECONDS)
    control.close()
    assert (code, node.last_words()) == (0, "")
    assert stood.exists()


# ---------------------------------------------------------------- bad input


def test_a_node_with_another_model_is_refused_on_both_sides_in_one_line(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    file, described = seated
    other = msgspec.structs.replace(described.hosts[1], model=str(models / "dbrx"))
    file.write_text(cluster_toml(msgspec.structs.replace(described, hosts=[described.hosts[0], other])))
    with pytest.raises(BadInput, match=r"node 1 \(mac-1\): its model differs from the launcher"):
        run_seated(file, server, models / "mixtral")
    assert server.nodes[1].wait(PATIENCE_SECONDS) == 2
    assert server.nodes[1].last_words().startswith("moesched: its model differs from the launcher")


def test_a_node_with_too_little_memory_says_how_much_is_missing(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    file, described = seated
    small = msgspec.structs.replace(described.hosts[1], memory=70_000)
    file.write_text(cluster_toml(msgspec.structs.replace(described, hosts=[described.hosts[0], small])))
    with pytest.raises(BadInput, match=r"node 1 \(mac-1\): .*[0-9,]+ bytes too few.*on node 1 of 2"):
        run_seated(file, server, models / "mixtral")
    assert server.nodes[1].wait(PATIENCE_SECONDS) == 2
    assert server.nodes[1].last_words().count("\n") == 0


def test_a_port_of_a_node_in_use_is_told_on_both_sides(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    file, described = seated
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        other = msgspec.structs.replace(described.hosts[1], port=port)
        file.write_text(cluster_toml(msgspec.structs.replace(described, hosts=[described.hosts[0], other])))
        with pytest.raises(BadInput, match=rf"node 1 \(mac-1\): .*{port}.*in use"):
            run_seated(file, server, models / "mixtral")
    assert server.nodes[1].wait(PATIENCE_SECONDS) == 2
    assert "in use" in server.nodes[1].last_words()


def test_nodes_are_found_by_their_names_too(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path, expected: dict[str, list[list[int]]]
) -> None:
    file, _ = seated
    file.write_text(file.read_text().replace("127.0.0.1", "localhost"))
    assert run_seated(file, server, models / "mixtral").tokens == expected["mixtral"]


def test_a_slow_node_is_told_of_by_its_rank(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    with capture_logs() as logs:
        run_seated(
            seated[0],
            server,
            models / "mixtral",
            policy="policies_for_tests:SlowOnTheSecond",
            max_new_tokens=12,
        )
    slow = [log for log in logs if "slow" in log["event"]]
    assert [log["node"] for log in slow] == ["node 1 (mac-1)"]
    assert slow[0]["factor"] >= 2


def test_a_policy_for_one_machine_is_refused(
    models: Path, server: ForkServer, seated: tuple[Path, Cluster]
) -> None:
    with pytest.raises(BadInput, match="does not share experts among 2 nodes"):
        run_seated(seated[0], server, models / "mixtral", policy="resident")


def test_a_policy_that_needs_more_nodes_than_there_are_is_refused(
    models: Path, server: ForkServer, seated: tuple[Path, Cluster]
) -> None:
    with pytest.raises(BadInput, match="the placement is for 3 nodes, but there are 2"):
        run_seated(seated[0], server, models / "mixtral", policy="policies_for_tests:ForThree")


def test_keys_of_others_ports_in_use_and_ranks_that_are_not_there_take_one_line(
    seated: tuple[Path, Cluster], models: Path, command: Any, tmp_path: Path
) -> None:
    file, described = seated
    node = ("node", models / "mixtral", "--cluster", file)
    refused(command(*node, "--rank", 5), "--rank is 5")
    refused(
        command(*node, "--rank", 0, "--key", tmp_path / "keys-1" / SECRET_NAME), "is not the key of node 0"
    )
    refused(command(*node, "--rank", 0, "--patience", 0.2), "no launcher at 127.0.0.1")
    launch = ("launch", models / "mixtral", "--hosts", file, "--policy", "ep_naive", "--prompt-ids", "1")
    refused(command(*launch, "--key", tmp_path / "keys-1" / SECRET_NAME), "is not the launcher's key")
    held = Control("127.0.0.1", described.launcher.port, make_keys(), {})
    try:
        refused(
            command(*launch, "--key", tmp_path / "launcher" / SECRET_NAME),
            f"port {described.launcher.port} of 127.0.0.1 is in use",
        )
    finally:
        held.close()


def test_what_does_not_go_with_local_nodes_is_refused(models: Path, command: Any) -> None:
    run = ("run", models / "mixtral", "--policy", "ep_naive", "--prompt-ids", "1")
    refused(command(*run, "--local", 0), "--local is 0")
    refused(command(*run, "--local", 2, "--tensor-parallel", 2), "omit --tensor-parallel")
    refused(command(*run, "--transport", "zeromq"), "give --local N as well")
    refused(command(*run, "--local", 2, "--transport", "inproc"), "does not connect processes")
