"""Facts about the machines of a cluster file, as seen from this machine."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from ipaddress import ip_address

from msgspec.structs import replace

from moesched.cluster.cluster_file import Cluster, Host
from moesched.cluster.members import ssh_command
from moesched.doctor.facts import NO_ANSWER, ClusterFacts, PortFacts, PortState, SshFacts

SECONDS = 8.0
"""Seconds in which a node has to answer by ssh, including the start of moesched there."""
PORT_SECONDS = 3.0
NOT_FOUND = 127
"""Exit code of a shell if it does not find the command."""
OF_SSH = 255
"""Exit code of ssh if it reaches no shell."""


def cluster_facts(cluster: Cluster, seconds: float = SECONDS) -> ClusterFacts:
    """Ask every node of a cluster file by ssh for moesched's version, and connect to every port, all at the same time.

    Args:
        seconds: the largest number of seconds that one node's ssh may take to answer.
    """
    ssh = shutil.which("ssh") is not None
    places = [("the launcher", cluster.launcher.address, cluster.launcher.port)]
    places += [(str(host), host.address, host.port) for host in cluster.hosts]
    with ThreadPoolExecutor(max_workers=32) as pool:
        nodes = pool.map(lambda host: _node(host, seconds), cluster.hosts) if ssh else ()
        ports = pool.map(lambda place: _port(*place), [place for place in places if place[2]])
        return ClusterFacts(ssh=ssh, version=version("moesched"), nodes=list(nodes), ports=list(ports))


def _node(host: Host, seconds: float) -> SshFacts:
    destination = host.ssh or host.address
    facts = SshFacts(who=str(host), destination=destination, command=host.command)
    done = _done(ssh_command(host, ["--version"]), seconds)
    if done is None:
        return replace(facts, problem=f"{NO_ANSWER} within {seconds:g} s")
    said = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
    if done.returncode == OF_SSH:
        return replace(facts, problem=said[0])
    if done.returncode == NOT_FOUND:
        return facts
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return replace(facts, failure=said[0])
    return replace(facts, version=lines[-1])


def _done(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """Run a program and return its outputs and exit code; None if it takes longer than `seconds`.

    A program that takes too long is killed, with the processes that it started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as program:
        try:
            out, err = program.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            return None
    return subprocess.CompletedProcess(command, program.returncode, out, err)


def _port(who: str, address: str, port: int) -> PortFacts:
    return PortFacts(who=who, address=address, port=port, state=port_state(address, port))


def port_state(address: str, port: int) -> PortState:
    """Connect to a port; return "free" (as it should be before a run), "taken", "silent" (no answer) or "forbidden"."""
    try:
        with socket.create_connection((address, port), timeout=PORT_SECONDS):
            return "taken"
    except ConnectionRefusedError:
        return _own_port_state(address, port)
    except (OSError, UnicodeError):  # of names that cannot be, such as mac..lan
        return "silent"


def _own_port_state(address: str, port: int) -> PortState:
    """Return "forbidden" if this process may not listen on a port of this machine, otherwise "free".

    A port of another machine cannot be tried, and counts as "free".
    """
    try:
        family = socket.AF_INET6 if ":" in address and ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
    except OSError as error:
        return "forbidden" if error.errno == errno.EACCES else "free"
    return "free"
