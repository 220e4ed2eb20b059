"""Checks a node that asks to join: its version, rank, key and model must be those that the launcher expects."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from moesched.cluster.cluster_file import Cluster
from moesched.cluster.messages import PROTOCOL, JoinRequest
from moesched.models.checkpoint import Checkpoint


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's version and model, which each node must share.

    Attributes:
        version: version of moesched.
        model: fingerprint of the model's files.
    """

    version: str
    model: str


def refusal(join: JoinRequest, key: str, cluster: Cluster, expected: Expected) -> str | None:
    """Return the reason to refuse a node that asks to join, in one line; None to admit the node.

    Args:
        key: public key with which the node connected.
        expected: the launcher's version and model.
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
        return "its model differs from the launcher's in configuration, tensors or files: copy the whole folder again"
    return None


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hash of a model's configuration, its tensors' names, shapes, dtypes and places, and its files' sizes.

    Copies of a checkpoint have equal fingerprints, wherever they are. A copy may have only a file's header in place of
    the file, since the header tells the file's size. Values of weights are not covered: reading them would take as long
    as loading the model.
    """
    tensors = sorted(
        (name, list(stored.shape), stored.format.name, stored.file.name, stored.offset, stored.nbytes)
        for name, stored in checkpoint.tensors.items()
    )
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    sizes = [(file.name, checkpoint.absent.get(file) or file.stat().st_size) for file in files]
    config = msgspec.structs.replace(checkpoint.config, name="")  # the folder's name
    content = (msgspec.to_builtins(config), tensors, sizes)
    return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
