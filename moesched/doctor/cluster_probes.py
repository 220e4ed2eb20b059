"""Probes of a cluster file: ssh, the command on each node, and the ports."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import NO_ANSWER, Facts, SshFacts
from moesched.doctor.findings import Finding, finding

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
            yield _of_node(node, cluster.version)
    else:
        yield finding("ssh-missing")
    for port in cluster.ports:
        yield finding(f"port-{port.state}", port=port)


def _of_node(node: SshFacts, here: str) -> Finding:
    if node.problem:
        problem = node.problem.lower()
        _, says, remedy = next(
            (each for each in SSH_PROBLEMS if any(word.lower() in problem for word in each[0])),
            ((), "is not reached by ssh", BY_HAND),
        )
        return finding("ssh-trouble", node=node, says=says, remedy=remedy.format(to=node.destination))
    if node.failure:
        return finding("node-fails", node=node)
    if not node.version:
        return finding("node-without-command", node=node)
    return finding("ssh" if node.version == here else "node-of-another-version", node=node, here=here)
