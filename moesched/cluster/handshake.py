"""Who may take part: what a node must have in common with the launcher, and why one is refused."""

from __future__ import annotations

import msgspec

from moesched.cluster.cluster_file import Cluster
from moesched.cluster.messages import PROTOCOL, JoinRequest


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher has.

    Attributes:
        version: of moesched.
        model: the fingerprint of its folder of the model.
    """

    version: str
    model: str


def refusal(join: JoinRequest, key: str, cluster: Cluster, expected: Expected) -> str | None:
    """Why a node may not join, in one line; None where it may.

    Args:
        key: by which its connection is known.
    """
    if join.protocol != PROTOCOL or join.version != expected.version:
        return (
            f"it has moesched {join.version}, protocol {join.protocol}, and the launcher {expected.version}, protocol "
            f"{PROTOCOL}: install the same version everywhere"
        )
    if not 0 <= join.rank < len(cluster.hosts):
        return (
            f"it has rank {join.rank}, and the cluster has ranks 0 to {len(cluster.hosts) - 1}: give --rank"
        )
    host = cluster.hosts[join.rank]
    if key != host.key:
        others = [each.rank for each in cluster.hosts if each.key == key]
        whose = f"that of rank {others[0]}" if others else "the launcher's"
        return f"it has rank {join.rank}, but its key is {whose}: give the --rank that the cluster file says"
    if join.model != expected.model:
        return (
            "its model is another one than the launcher's: configuration, tensors or files differ: copy the whole "
            "folder again"
        )
    return None
