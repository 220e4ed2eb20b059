"""Nodes from a fork server that has torch loaded already, so that they start in milliseconds; what kills them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from moesched.cluster.cluster_file import Host
from moesched.cluster.members import Process, Start
from moesched.runs.listeners import Listener
from moesched.system.collector import rare_collections

PRELOADED = [
    "anyio._backends._asyncio",
    "moesched.cli.main",
    "moesched.cluster.node",
    "moesched.devices.torch.device",
    "moesched.transports.zeromq",
    "pytest",
    "structlog",
    "uvloop",
]


class ForkedProcess:
    """A node's process, as the launcher wants it."""

    watched = True

    def __init__(self, process: BaseProcess, errors: Path) -> None:
        self.process = process
        self._errors = errors

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("node", timeout or 0)
        return code

    def last_words(self) -> str:
        return self._errors.read_text().strip() if self._errors.exists() else ""


class ForkServer:
    """Starts nodes, and remembers them.

    Attributes:
        nodes: those that were started, by rank; the last one of each.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, ForkedProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def __call__(self, folder: Path) -> Start:
        def start(host: Host, arguments: Sequence[str]) -> Process:
            return self.start(host.rank, arguments, folder / f"node-{host.rank}.err")

        return start

    def start(
        self, rank: int, arguments: Sequence[str], errors: Path, before: Callable[[], object] = int
    ) -> ForkedProcess:
        process = self._context.Process(target=_run, args=(list(arguments), str(errors), before), daemon=True)
        process.start()
        self.nodes[rank] = ForkedProcess(process, errors)
        return self.nodes[rank]


class Killer(Listener):
    """Does something when a number of tokens has come.

    Attributes:
        since: when it did, on the monotonic clock.
    """

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self._left = at
        self._act = act
        self.since = 0.0

    def generated(self, request: int, token: int, text: str) -> None:
        """Count a token."""
        self._left -= 1
        if not self._left:
            self.since = time.monotonic()
            self._act()


def _run(arguments: list[str], errors: str, before: Callable[[], object]) -> None:
    from moesched.cli.main import main

    handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    before()
    gc.freeze()  # the modules that it was forked with stay
    with rare_collections():
        code = main(arguments)
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # a process of `multiprocessing` would turn a standard error that is full into code 1
