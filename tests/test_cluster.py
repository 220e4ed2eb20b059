"""Nodes that are processes, over ZeroMQ with CURVE, give one process's tokens."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

import moesched
from benchmarks.shared.forked_nodes import ForkServer
from cluster_fixtures import MIXTRAL, PROMPTS, first_node, run_here, run_seated
from commands import refused
from moesched.cluster.cluster_file import Cluster, cluster_toml
from moesched.cluster.control import Control
from moesched.cluster.curve.keys import SECRET_NAME, make_keys
from moesched.cluster.messages import Failed, Quit, Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput
from moesched.runs.listeners import Listener
from moesched.trace import read_trace
from patience import PATIENCE_SECONDS
from small_models import small_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "policy", "nodes", "settings"),
    [
        ("mixtral", "ep_router_aided", 2, {}),
        ("mixtral", "ep_naive", 2, {}),
        ("dbrx", "ep_busy_full", 2, {}),
        ("dbrx", "ep_balanced", 3, {"experts": 3}),
        ("dbrx", "layer_streaming", 1, {}),
    ],
)
def test_processes_give_the_tokens_of_one(
    forks: ForkServer,
    models: Path,
    expected: dict[str, list[list[int]]],
    model: str,
    policy: str,
    nodes: int,
    settings: dict[str, Any],
) -> None:
    """A node alone runs any policy."""
    report = run_here(models / model, forks, nodes, policy=policy, settings=settings)
    assert report.tokens == expected[model]
    assert [member.lost for member in report.members] == [None] * nodes
    assert report.epochs == 1
    assert report.request_times is not None
    assert len(report.request_times.between_tokens_seconds) == len(PROMPTS)


def test_weights_that_change_on_the_nodes_are_the_failure_of_the_run(
    forks: ForkServer, tmp_path: Path
) -> None:
    model = small_model(tmp_path / "model", config=MIXTRAL)
    (weights,) = model.glob("*.safetensors")

    class Appends(Listener):
        def generated(self, request: int, token: int, text: str) -> None:
            with weights.open("ab") as file:
                file.write(b"more")

    report = run_here(model, forks, 2, policy="ep_naive", listener=Appends())
    assert report.tokens is not None
    assert any(report.tokens)
    assert report.failure is not None
    assert report.failure.startswith(f"{weights} was changed from ")
    assert "the tokens of requests 0 to 2 may be wrong" in report.failure


def test_all_nodes_stand_in_one_trace_on_one_clock(forks: ForkServer, models: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run_here(models / "mixtral", forks, 2, max_new_tokens=3, batch_size=2, trace=trace)
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


def test_nodes_are_found_by_their_names_too(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path, expected: dict[str, list[list[int]]]
) -> None:
    file, _ = seated
    file.write_text(file.read_text().replace("127.0.0.1", "localhost"))
    assert run_seated(file, forks, models / "mixtral").tokens == expected["mixtral"]


def test_a_slow_node_is_told_of_by_its_rank(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path
) -> None:
    with capture_logs() as logs:
        slow = {"policy": "policies_for_tests:SlowOnTheSecond", "max_new_tokens": 12}
        run_seated(seated[0], forks, models / "mixtral", **slow)
    [told] = [log for log in logs if "slow" in log["event"]]
    assert told["node"] == "node 1 (mac-1)"
    assert told["factor"] >= 2


class StandingDevice(TorchDevice):
    """Leaves a file where it stood by."""

    def __init__(self, checkpoint: Any, layout: Any, file: str = "") -> None:
        super().__init__(checkpoint, layout)
        self._file = Path(file)

    def stand_by(self) -> None:
        self._file.touch()


def test_the_device_of_a_node_that_waits_for_something_to_do_stands_by(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path, tmp_path: Path
) -> None:
    stood = tmp_path / "stood by"
    control, node, joined = first_node(seated, forks, models)
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


class BrokenStandby(TorchDevice):
    """Cannot stand by."""

    def stand_by(self) -> None:
        raise OverflowError("7,927,234,560 items")


def test_a_node_that_cannot_stand_by_tells_the_launcher_why(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path
) -> None:
    control, node, joined = first_node(seated, forks, models)
    run = NodeRun(policy="ep_naive", device="test_cluster:BrokenStandby")
    control.say(joined.peer, Welcome(run=run, lost_after=PATIENCE_SECONDS, transport="zeromq"))
    failures: list[str] = []
    while not failures:
        failures += [each.message.message for each in control.hear(0.01) if isinstance(each.message, Failed)]
    code = node.wait(PATIENCE_SECONDS)
    control.close()
    assert re.fullmatch(r"\S*test_cluster\.py:\d+: OverflowError: 7,927,234,560 items", failures[0])
    assert code == 1


# -- models, memories, ports, keys and policies that do not go together ----------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize(
    ("wrong", "launcher", "node"),
    [
        ("model", "its model differs from the launcher", "its model differs from the launcher"),
        ("memory", "[0-9,]+ bytes too few.*on node 1 of 2", "bytes too few"),
        ("port", "in use", "in use"),
    ],
)
def test_a_node_with_another_model_too_little_memory_or_a_port_in_use_is_told_on_both_sides_in_one_line(
    seated: tuple[Path, Cluster],
    forks: ForkServer,
    models: Path,
    taken: int,
    wrong: str,
    launcher: str,
    node: str,
) -> None:
    file, described = seated
    value = {"model": str(models / "dbrx"), "memory": 70_000, "port": taken}[wrong]
    other = msgspec.structs.replace(described.hosts[1], **{wrong: value})
    file.write_text(cluster_toml(msgspec.structs.replace(described, hosts=[described.hosts[0], other])))
    with pytest.raises(BadInput, match=rf"node 1 \(mac-1\): .*{launcher}"):
        run_seated(file, forks, models / "mixtral")
    assert forks.nodes[1].wait(PATIENCE_SECONDS) == 2
    assert re.match(rf"moesched: .*{node}.*$", forks.nodes[1].last_words())
    assert "\n" not in forks.nodes[1].last_words()


def test_a_policy_for_another_number_of_nodes_is_refused(
    models: Path, forks: ForkServer, seated: tuple[Path, Cluster]
) -> None:
    with pytest.raises(BadInput, match=r"policies_for_tests\.py:\d+\b.*: the placement is for 3 nodes"):
        run_seated(seated[0], forks, models / "mixtral", policy="policies_for_tests:ForThree")


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
