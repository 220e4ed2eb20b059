"""Models, memories, ports, keys and policies that do not go together: refused in one line on both sides."""

from __future__ import annotations

import socket
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
