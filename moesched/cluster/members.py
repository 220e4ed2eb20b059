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
from moesched.system.children import tied_child
from moesched.system.logs import Log

_log = Log(__name__)

GRACE_SECONDS = 10.0
"""Time that a process has to end by itself after the run."""
ENDS_WITH_STDIN = "--ends-with-stdin"
"""The option of a node that ends with the program that started it, over ssh as well."""


class Process(Protocol):
    """A node's process, from the launcher's view.

    Attributes:
        watched: whether the launcher can see its end.
    """

    @property
    def watched(self) -> bool: ...

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def kill(self) -> None:
        """Kill it."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code, or raise subprocess.TimeoutExpired."""

    def last_words(self) -> str:
        """Its standard error, stripped; empty where that was not kept."""


Start = Callable[[Host, Sequence[str]], Process]
"""Starts the process of a node with the arguments of `moesched`."""


class LocalProcess:
    """A child process that ends with this one, in its own session: Ctrl-C on the terminal reaches only the launcher."""

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
        """Its exit code."""
        return self._child.poll()

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._child.kill()
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        code = self._child.wait(timeout)
        if self._child.stdin is not None:
            self._child.stdin.close()
        return code

    def last_words(self) -> str:
        """Its standard error."""
        return "" if self._errors is None else self._errors.read_text(errors="replace").strip()


def start_here(folder: Path) -> Start:
    """Start nodes as children of this process.

    Args:
        folder: the folder for files of their standard error, which the launcher reports.
    """

    def start(host: Host, arguments: Sequence[str]) -> Process:
        command = [sys.executable, "-m", "moesched", *arguments, ENDS_WITH_STDIN]
        return LocalProcess(command, folder / f"node-{host.rank}.err")

    return start


def start_by_ssh(host: Host, arguments: Sequence[str]) -> Process:
    """Start a node with the system's `ssh`, without asking for a password.

    Raises:
        BadInput: there is no ssh here.
    """
    try:
        return LocalProcess(ssh_command(host, [*arguments, ENDS_WITH_STDIN]))
    except FileNotFoundError:
        raise BadInput(
            "there is no `ssh` on this machine: install OpenSSH, or start `moesched node` yourself"
        ) from None


def ssh_command(host: Host, arguments: Sequence[str]) -> list[str]:
    """The command that starts a node with these arguments on its machine."""
    remote = f"{host.command} {shlex.join(arguments)}"
    return ["ssh", "-o", "BatchMode=yes", "--", host.ssh or host.address, remote]


class ByOthers:
    """A node that another program starts and ends; only its connection shows whether it runs."""

    watched = False

    def poll(self) -> int | None:
        """None: its end cannot be seen."""
        return None

    def kill(self) -> None:
        """Do nothing: the node ends by itself when the launcher is silent."""

    def wait(self, timeout: float | None = None) -> int:
        """Raise subprocess.TimeoutExpired: its end cannot be seen."""
        raise subprocess.TimeoutExpired("a node that others started", timeout or 0)

    def last_words(self) -> str:
        """An empty text: its standard error is not known here."""
        return ""


def start_by_others(host: Host, arguments: Sequence[str]) -> Process:
    """Start nothing: another program, or a person at that machine, starts the node."""
    return ByOthers()


def node_arguments(cluster_file: Path, host: Host, model: Path) -> list[str]:
    """Arguments of `moesched` for a node."""
    file = str(cluster_file.absolute())  # ssh starts in the home folder
    return ["node", host.model or str(model), "--cluster", file, "--rank", str(host.rank)]


def share_cores(nodes: int) -> list[list[int]]:
    """Equal numbers of this machine's cores for each node; nodes share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not cores:
        return [[] for _ in range(nodes)]
    each = max(1, len(cores) // nodes)
    return [[cores[(rank * each + place) % len(cores)] for place in range(each)] for rank in range(nodes)]


SetAffinity = Callable[[int, Sequence[int]], object]

SET_AFFINITY: SetAffinity | None = getattr(os, "sched_setaffinity", None)
"""This system's way to bind a process to cores; None on macOS."""


def keep_to(cores: Sequence[int], set_affinity: SetAffinity | None = SET_AFFINITY) -> None:
    """Restrict this process, and the threads that it starts from now on, to some cores; an empty list means all.

    Args:
        set_affinity: the system's way to do that; without one, cores are ignored, which is logged.

    Raises:
        BadInput: one of them does not exist.
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
