"""Fixtures for clusters of processes: a fork server, models, and a cluster file with its keys."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moesched
from benchmarks.shared.forked_nodes import ForkedProcess, ForkServer
from clusters import LAUNCHER, cluster, host
from meshes import free_port
from moesched.cluster.cluster_file import Cluster, cluster_toml
from moesched.cluster.cluster_jobs import run_cluster, run_local
from moesched.cluster.control import Control
from moesched.cluster.curve.keys import SECRET_NAME, write_keys
from patience import PATIENCE_SECONDS
from small_models import SMALL, small_model

PROMPTS = [[1, 2, 3], [4, 5], [6]]
NEW_TOKENS = 6


MIXTRAL = SMALL.varied(layers=2, name="mixtral")
DBRX = MIXTRAL.varied(form="dbrx", transposed_down=True, norm="layer", experts=5, top_k=2, name="dbrx")


@pytest.fixture(scope="session")
def forks() -> ForkServer:
    return ForkServer()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    for config in (MIXTRAL, DBRX):
        small_model(folder / config.name, config=config)
    return folder


@pytest.fixture(scope="session")
def expected(models: Path) -> dict[str, list[list[int]]]:
    """Tokens that one process generates."""
    return {
        name: moesched.run_model(
            models / name, PROMPTS, policy="resident", max_new_tokens=NEW_TOKENS, batch_size=3
        ).tokens
        or []
        for name in ("mixtral", "dbrx")
    }


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


def run_here(model: Path, forks: ForkServer, nodes: int, **more: Any) -> Any:
    """The report of some nodes on this machine."""
    arguments: dict[str, Any] = {"policy": "ep_router_aided", "max_new_tokens": NEW_TOKENS, "start": forks}
    return run_local(model, PROMPTS, nodes=nodes, **arguments | more)


def run_seated(file: Path, forks: ForkServer, model: Path, **more: Any) -> Any:
    """The report of the nodes of a cluster file."""
    arguments: dict[str, Any] = {"policy": "ep_router_aided", "max_new_tokens": NEW_TOKENS}
    key = file.parent / "launcher" / SECRET_NAME
    return run_cluster(
        model, PROMPTS, cluster_file=file, key=key, **{"start": forks(file.parent)} | arguments | more
    )


def first_node(
    seated: tuple[Path, Cluster], forks: ForkServer, models: Path
) -> tuple[Control, ForkedProcess, Any]:
    """A launcher's control channel, a node that wants to join, and what it says."""
    file, described = seated
    control = Control(
        "127.0.0.1", described.launcher.port, LAUNCHER, {each.key: each.name for each in described.hosts}
    )
    arguments = ["node", str(models / "mixtral"), "--cluster", str(file), "--rank", "0"]
    node = forks.start(0, arguments, file.parent / "err")
    while not (heard := list(control.hear(5))):
        pass
    return control, node, heard[0]


def fill_disk() -> None:
    """Let every write to a file fail, as on a full disk, those of logs too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    os.environ["MOESCHED_LOG"] = "debug"
