"""Models, memories, ports, keys and policies that do not go together: refused in one line on both sides."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.shared.forked_nodes import ForkServer
from cluster_fixtures import run_seated
from commands import refused
from moesched.cluster.cluster_file import Cluster, cluster_toml
from moesched.cluster.control import Control
from moesched.cluster.curve.keys import SECRET_NAME, make_keys
from moesched.errors import BadInput
from patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow


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
    server: ForkServer,
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
        run_seated(file, server, models / "mixtral")
    assert server.nodes[1].wait(PATIENCE_SECONDS) == 2
    assert re.match(rf"moesched: .*{node}.*$", server.nodes[1].last_words())
    assert "\n" not in server.nodes[1].last_words()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("resident", "does not share experts among 2 nodes"),
        ("policies_for_tests:ForThree", "the placement is for 3 nodes, but there are 2"),
    ],
)
def test_a_policy_for_another_number_of_nodes_is_refused(
    models: Path, server: ForkServer, seated: tuple[Path, Cluster], policy: str, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        run_seated(seated[0], server, models / "mixtral", policy=policy)


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
