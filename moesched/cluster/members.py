"""The processes of a cluster's nodes: started here, over ssh, or by others."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from moesched.cluster.cluster_file import Host
from moesched.errors import BadInput

GRACE_SECONDS = 2.0
"""What a process has to end by itself when the run is over."""


class Process(Protocol):
    """A node's process, as far as the launcher can see it."""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired where it does not come."""

    def last_words(self) -> str:
        """What it said to standard error, where that was kept, without blanks around it."""


Start = Callable[[Host, Sequence[str]], Process]
"""Starts the process of a node with the arguments of `moesched`."""


class LocalProcess:
    """A child of this process, in a session of its own, so that Ctrl-C on the terminal reaches the launcher only."""

    def __init__(self, command: Sequence[str], errors: Path | None = None) -> None:
        self._errors = errors
        stderr: IO[bytes] | None = None if errors is None else errors.open("wb")
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        finally:
            if stderr is not None:
                stderr.close()

    def poll(self) -> int | None:
        """Its exit code."""
        return self._child.poll()

    def kill(self) -> None:
        """End it, and wait for that."""
        self._child.kill()
        self._child.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        return self._child.wait(timeout)

    def last_words(self) -> str:
        """Its standard error."""
        return "" if self._errors is None else self._errors.read_text(errors="replace").strip()


def start_here(folder: Path) -> Start:
    """Starts nodes as children of this process.

    Args:
        folder: what they say to standard error is kept there, since the launcher says it for them.
    """

    def start(host: Host, arguments: Sequence[str]) -> Process:
        return LocalProcess([sys.executable, "-m", "moesched", *arguments], folder / f"node-{host.rank}.err")

    return start


def start_by_ssh(host: Host, arguments: Sequence[str]) -> Process:
    """Starts a node with the system's `ssh`, which asks for no password.

    Raises:
        BadInput: there is no ssh here.
    """
    try:
        return LocalProcess(ssh_command(host, arguments))
    except FileNotFoundError:
        raise BadInput(
            "there is no `ssh` on this machine: install OpenSSH, or start `moesched node` yourself"
        ) from None


def ssh_command(host: Host, arguments: Sequence[str]) -> list[str]:
    """What `start_by_ssh` runs."""
    remote = f"{host.command} {shlex.join(arguments)}"
    return ["ssh", "-o", "BatchMode=yes", host.ssh or host.address, remote]


class ByOthers:
    """A node that somebody else starts and ends: only its silence says that it is gone."""

    def poll(self) -> int | None:
        """Nobody knows."""
        return None

    def kill(self) -> None:
        """It ends when the launcher is silent."""

    def wait(self, timeout: float | None = None) -> int:
        """It ends by itself, and nobody sees it."""
        raise subprocess.TimeoutExpired("a node that others started", timeout or 0)

    def last_words(self) -> str:
        """Nobody heard them."""
        return ""


def start_by_others(host: Host, arguments: Sequence[str]) -> Process:
    """Leaves it to others, such as mpirun or a person at that machine."""
    return ByOthers()


def node_arguments(cluster_file: Path, host: Host, model: Path) -> list[str]:
    """The arguments of `moesched` that make a process a node."""
    return ["node", host.model or str(model), "--cluster", str(cluster_file), "--rank", str(host.rank)]


def share_cores(nodes: int) -> list[list[int]]:
    """Cores for each node of this machine: as many for each, one at least, which they share where there are fewer."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not cores:
        return [[] for _ in range(nodes)]
    each = max(1, len(cores) // nodes)
    return [[cores[(rank * each + place) % len(cores)] for place in range(each)] for rank in range(nodes)]


def keep_to(cores: Sequence[int]) -> None:
    """Keep this process, and the threads that it starts from now on, to some cores; nothing where none are named.

    Raises:
        BadInput: this machine lacks one of them.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise BadInput(
            f"cores {', '.join(map(str, cores))}: {error.strerror}: this process may use "
            f"{', '.join(map(str, sorted(os.sched_getaffinity(0))))}: correct the cluster file"
        ) from None
