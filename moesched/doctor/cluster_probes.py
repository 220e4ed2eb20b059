"""Probes of a cluster file: ssh, the command on each node, and the ports."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import NO_ANSWER, ClusterFacts, Facts, PortFacts, SshFacts
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


BY_HAND = "try by hand: ssh -o BatchMode=yes {to} true"
SSH_PROBLEMS = (
    (
        ("permission denied", "authentication"),
        "is not reached without a password",
        "ssh-copy-id {to}, then " + BY_HAND,
    ),
    (
        ("host key verification",),
        "is not reached without a question about its key",
        "run `ssh {to}` once and answer it; where the machine was set up anew: ssh-keygen -R its name",
    ),
    (
        ("could not resolve", "name or service", "nodename nor servname"),
        "has no address that is known here",
        "correct `ssh` or `address` of the host in the cluster file, or let the name resolve, as in /etc/hosts",
    ),
    (
        ("connection refused",),
        "runs no ssh server",
        "start one there: on a Mac, System Settings > General > Sharing > Remote Login",
    ),
    (
        ("timed out", "no route", "unreachable", NO_ANSWER),
        "does not answer ssh",
        "switch the machine on, keep it awake, and open its port 22; " + BY_HAND,
    ),
)
"""Words of ssh, their meaning for the node, and the remedy, with `to` for the destination."""


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
        problem = node.problem.lower()
        _, says, remedy = next(
            (each for each in SSH_PROBLEMS if any(word.lower() in problem for word in each[0])),
            ((), "is not reached by ssh", BY_HAND),
        )
        return Finding(
            about=about, says=f"{node.who} {says}: {node.problem}", remedy=remedy.format(to=node.destination)
        )
    if node.failure:
        return Finding(
            about=about,
            says=f"{node.who} cannot start moesched: {node.failure}",
            remedy=f"try there: {node.command} --version, and install moesched anew, or correct `command` of the host",
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
