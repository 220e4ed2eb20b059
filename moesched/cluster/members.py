"""Manages the processes of a cluster's nodes. The launcher starts them here or over ssh, or another program does."""

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
from moesched.system.children import tied_child
from moesched.system.logs import Log

_log = Log(__name__)

GRACE_SECONDS = 10.0
"""Seconds that a process has to end by itself after the run."""
ENDS_WITH_STDIN = "--ends-with-stdin"
"""Option of `moesched node` that makes it end with the program that started it, over ssh as well."""


class Process(Protocol):
    """A node's process, from the launcher's view.

    Attributes:
        watched: whether the launcher can see the process end.
    """

    @property
    def watched(self) -> bool: ...

    def poll(self) -> int | None:
        """Return the process's exit code; None while it runs."""

    def kill(self) -> None:
        """Kill the process."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends; return its exit code, or raise subprocess.TimeoutExpired after `timeout` s."""

    def last_words(self) -> str:
        """Return the process's standard error, stripped; empty if it was not kept."""


Start = Callable[[Host, Sequence[str]], Process]
"""Function that starts the process of a host's node, given the arguments of `moesched`."""


class LocalProcess:
    """A node's process, as a child that ends with this process; it has its own session, so Ctrl-C does not reach it.

    Args:
        command: the command that starts the node.
        errors: the file for the node's standard error; None if it is not kept.
    """

    watched = True

    def __init__(self, command: Sequence[str], errors: Path | None = None) -> None:
        self._errors = errors
        stderr: IO[bytes] | None = None if errors is None else errors.open("wb")
        try:
            self._child = tied_child(command, stderr)
        finally:
            if stderr is not None:
                stderr.close()

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._child.poll()

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._child.kill()
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends; return its exit code, or raise subprocess.TimeoutExpired after `timeout` s."""
        code = self._child.wait(timeout)
        if self._child.stdin is not None:
            self._child.stdin.close()
        return code

    def last_words(self) -> str:
        """Return the process's standard error, stripped."""
        return "" if self._errors is None else self._errors.read_text(errors="replace").strip()


def start_here(folder: Path) -> Start:
    """Return a function that starts nodes as children of this process.

    Args:
        folder: the folder for files with the nodes' standard error, which the launcher reports.
    """

    def start(host: Host, arguments: Sequence[str]) -> Process:
        command = [sys.executable, "-m", "moesched", *arguments, ENDS_WITH_STDIN]
        return LocalProcess(command, folder / f"node-{host.rank}.err")

    return start


def start_by_ssh(host: Host, arguments: Sequence[str]) -> Process:
    """Start a host's node by the system's `ssh`, without asking for a password.

    Args:
        arguments: the arguments of the command `moesched` on that machine.

    Raises:
        BadInput: this machine has no ssh.
    """
    try:
        return LocalProcess(ssh_command(host, [*arguments, ENDS_WITH_STDIN]))
    except FileNotFoundError:
        raise BadInput(
            "there is no `ssh` on this machine: install OpenSSH, or start `moesched node` yourself"
        ) from None


def ssh_command(host: Host, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a host's node by ssh, given the arguments of `moesched`."""
    remote = f"{host.command} {shlex.join(arguments)}"
    return ["ssh", "-o", "BatchMode=yes", "--", host.ssh or host.address, remote]


class ByOthers:
    """A node's process that another program starts and ends; only the node's connection shows whether it runs."""

    watched = False

    def poll(self) -> int | None:
        """Return None: the process cannot be seen."""
        return None

    def kill(self) -> None:
        """Do nothing: the node ends by itself when it no longer hears from the launcher."""

    def wait(self, timeout: float | None = None) -> int:
        """Raise subprocess.TimeoutExpired: the process cannot be seen."""
        raise subprocess.TimeoutExpired("a node that others started", timeout or 0)

    def last_words(self) -> str:
        """Return an empty text: the node's standard error is not known here."""
        return ""


def start_by_others(host: Host, arguments: Sequence[str]) -> Process:
    """Return a stand-in for the process of a host's node, which another program, or a person, starts."""
    return ByOthers()


def node_arguments(cluster_file: Path, host: Host, model: Path) -> list[str]:
    """Return the arguments of `moesched` that run a host's node with this cluster file and model."""
    file = str(cluster_file.absolute())  # ssh starts in the home folder
    return ["node", host.model or str(model), "--cluster", file, "--rank", str(host.rank)]


def share_cores(nodes: int) -> list[list[int]]:
    """Return each node's cores: equal numbers of this machine's cores; nodes share cores if there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not cores:
        return [[] for _ in range(nodes)]
    each = max(1, len(cores) // nodes)
    return [[cores[(rank * each + place) % len(cores)] for place in range(each)] for rank in range(nodes)]


SetAffinity = Callable[[int, Sequence[int]], object]

SET_AFFINITY: SetAffinity | None = getattr(os, "sched_setaffinity", None)
"""The system's call that binds a process to cores; None on macOS, which has none."""


def keep_to(cores: Sequence[int], set_affinity: SetAffinity | None = SET_AFFINITY) -> None:
    """Restrict this process, and the threads that it starts from now on, to some cores; an empty list means all.

    Args:
        set_affinity: the system's call for this; with None, cores are ignored and a warning is logged.

    Raises:
        BadInput: one of the cores does not exist.
    """
    if not cores:
        return
    if set_affinity is None:
        _log.warning("cores are ignored: this system does not bind processes to cores", cores=[*cores])
        return
    try:
        set_affinity(0, cores)
    except OSError as error:
        raise BadInput(
            f"cores {', '.join(map(str, cores))}: {error.strerror}: this process may use "
            f"{', '.join(map(str, sorted(os.sched_getaffinity(0))))}: correct the cluster file"
        ) from None
