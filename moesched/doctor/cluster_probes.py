"""The probe that judges the facts about a cluster file: ssh, the command on each node, and the ports."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import NO_ANSWER, Facts, SshFacts
from moesched.doctor.findings import Finding, finding

SSH_PROBLEMS = {
    "ssh-password": ("permission denied", "authentication"),
    "ssh-question": ("host key verification",),
    "ssh-no-address": ("could not resolve", "name or service", "nodename nor servname"),
    "ssh-no-server": ("connection refused",),
    "ssh-silent": ("timed out", "no route", "unreachable", NO_ANSWER),
}
"""Words in ssh's error messages, in lower case, by the name of the finding that they lead to."""


def probe_cluster(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether this machine can start a cluster's nodes and reach their ports, if a file was given."""
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
        said = node.problem.lower()
        known = (name for name, words in SSH_PROBLEMS.items() if any(word in said for word in words))
        return finding(next(known, "ssh-unreached"), node=node)
    if node.failure:
        return finding("node-fails", node=node)
    if not node.version:
        return finding("node-without-command", node=node)
    return finding("ssh" if node.version == here else "node-of-another-version", node=node, here=here)
