"""Cluster files for tests: nodes on loopback, each with a key of its own."""

from __future__ import annotations

from typing import Any

from moesched.cluster.cluster_file import Cluster, Host, LauncherAddress
from moesched.cluster.curve.keys import make_keys

LAUNCHER = make_keys()
NODES = [make_keys() for _ in range(4)]


def host(number: int, **changes: Any) -> Host:
    """A node."""
    fields: dict[str, Any] = {
        "name": f"mac-{number}",
        "address": "127.0.0.1",
        "port": 7001 + number,
        "rank": number,
        "key": NODES[number].public,
    }
    return Host(**fields | changes)


def cluster(*hosts: Host, port: int = 7000) -> Cluster:
    """Some nodes; by default two."""
    launcher = LauncherAddress(address="127.0.0.1", port=port, key=LAUNCHER.public)
    return Cluster(launcher=launcher, hosts=list(hosts) or [host(0), host(1)])
