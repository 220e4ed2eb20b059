"""Probes of a cluster file: ssh, the command on each node, and the ports."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import ClusterFacts, Facts, PortFacts, SshFacts
from moesched.doctor.findings import Finding

PROBLEMS = {
    "silent": (
        "does not answer: it is closed by a firewall, or the machine is off",
        "open it there for TCP, or correct its address in the cluster file",
    ),
    "taken": (
        "is in use: something listens there already",
        "end that program, which may be an earlier node, or choose another port in the cluster file",
    ),
    "forbidden": ("may not be used by this user", "choose a port above 1023 in the cluster file"),
}
"""For each state of a port that is in trouble, what it says and the remedy."""


def probe_cluster(facts: Facts) -> Iterator[Finding]:
    """Say whether the launcher here can start the nodes and reach their ports; nothing without a cluster file."""
    cluster = facts.cluster
    if cluster is None:
        return
    if cluster.ssh:
        for node in cluster.nodes:
            yield _of_node(node, cluster)
    else:
        yield Finding(
            about="ssh",
            says="there is no `ssh` on this machine",
            remedy="install OpenSSH, or start `moesched node` yourself on each machine",
        )
    for port in cluster.ports:
        yield _of_port(port)


def _of_node(node: SshFacts, cluster: ClusterFacts) -> Finding:
    about = f"ssh {node.destination}"
    if node.problem:
        return Finding(
            about=about,
            says=f"{node.who} is not reached without a password: {node.problem}",
            remedy=f"ssh-copy-id {node.destination}, then try: ssh -o BatchMode=yes {node.destination} true",
        )
    if not node.version:
        return Finding(
            about=about,
            says=f"{node.who} does not find `{node.command}`: ssh sets a short PATH",
            remedy="write its whole path as `command` of the host in the cluster file",
        )
    if node.version != cluster.version:
        return Finding(
            about=about,
            says=f"{node.who} has moesched {node.version}, and this machine {cluster.version}",
            remedy="install the same version on all machines",
        )
    return Finding(about=about, says=f"{node.who} has moesched {node.version}")


def _of_port(port: PortFacts) -> Finding:
    about = f"port {port.address}:{port.port}"
    if port.state in PROBLEMS:
        says, remedy = PROBLEMS[port.state]
        return Finding(about=about, says=f"port {port.port} of {port.who} {says}", remedy=remedy)
    return Finding(about=about, says=f"free for {port.who}")
