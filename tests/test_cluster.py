"""Nodes that are processes, over ZeroMQ with CURVE, give one process's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import moesched
from benchmarks.shared.forked_nodes import ForkServer
from cluster_fixtures import MIXTRAL, PROMPTS, first_node, run_here, run_seated
from moesched.cluster.cluster_file import Cluster
from moesched.cluster.messages import Failed, Quit, Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.devices.torch.device import TorchDevice
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
    server: ForkServer,
    models: Path,
    expected: dict[str, list[list[int]]],
    model: str,
    policy: str,
    nodes: int,
    settings: dict[str, Any],
) -> None:
    """A node alone runs any policy."""
    report = run_here(models / model, server, nodes, policy=policy, settings=settings)
    assert report.tokens == expected[model]
    assert [member.lost for member in report.members] == [None] * nodes
    assert report.epochs == 1
    assert report.request_times is not None
    assert len(report.request_times.between_tokens_seconds) == len(PROMPTS)


def test_weights_that_change_on_the_nodes_are_the_failure_of_the_run(
    server: ForkServer, tmp_path: Path
) -> None:
    model = small_model(tmp_path / "model", config=MIXTRAL)
    (weights,) = model.glob("*.safetensors")

    class Appends(Listener):
        def generated(self, request: int, token: int, text: str) -> None:
            with weights.open("ab") as file:
                file.write(b"more")

    report = run_here(model, server, 2, policy="ep_naive", listener=Appends())
    assert report.tokens is not None
    assert any(report.tokens)
    assert report.failure is not None
    assert report.failure.startswith(f"{weights} was changed from ")
    assert "the tokens of requests 0 to 2 may be wrong" in report.failure


def test_all_nodes_stand_in_one_trace_on_one_clock(server: ForkServer, models: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run_here(models / "mixtral", server, 2, max_new_tokens=3, batch_size=2, trace=trace)
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
    seated: tuple[Path, Cluster], server: ForkServer, models: Path, expected: dict[str, list[list[int]]]
) -> None:
    file, _ = seated
    file.write_text(file.read_text().replace("127.0.0.1", "localhost"))
    assert run_seated(file, server, models / "mixtral").tokens == expected["mixtral"]


def test_a_slow_node_is_told_of_by_its_rank(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    with capture_logs() as logs:
        slow = {"policy": "policies_for_tests:SlowOnTheSecond", "max_new_tokens": 12}
        run_seated(seated[0], server, models / "mixtral", **slow)
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


class BrokenStandby(TorchDevice):
    """Cannot stand by."""

    def stand_by(self) -> None:
        raise OverflowError("7,927,234,560 items")


def test_a_node_that_cannot_stand_by_tells_the_launcher_why(
    seated: tuple[Path, Cluster], server: ForkServer, models: Path
) -> None:
    control, node, joined = first_node(seated, server, models)
    run = NodeRun(policy="ep_naive", device="test_cluster:BrokenStandby")
    control.say(joined.peer, Welcome(run=run, lost_after=PATIENCE_SECONDS, transport="zeromq"))
    failures: list[str] = []
    while not failures:
        failures += [each.message.message for each in control.hear(0.01) if isinstance(each.message, Failed)]
    code = node.wait(PATIENCE_SECONDS)
    control.close()
    assert failures == ["OverflowError: 7,927,234,560 items"]
    assert code == 1
