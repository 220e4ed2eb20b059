"""The engine's process, and the pipes to it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from moesched.server.link import EngineLink
from moesched.server.messages import BadServerFrame, Starting
from moesched.system.children import tied_child

PATIENCE_SECONDS = 5.0
"""Seconds that a process has to end after its input was closed."""


class Child:
    """A running process of the engine.

    Attributes:
        link: the link that sends requests to the process.
    """

    def __init__(self, process: subprocess.Popen[bytes], link: EngineLink) -> None:
        self._process = process
        self.link = link

    async def exit_code(self) -> int:
        """Wait until the engine's process ends, and return its exit code."""
        return await asyncio.to_thread(self._process.wait)


@asynccontextmanager
async def engine_child(
    command: Sequence[str], on_starting: Callable[[Starting], object]
) -> AsyncIterator[Child]:
    """Start an engine's process, and end it when the context ends.

    Args:
        command: the program and its arguments.
        on_starting: called with each message about the engine's start, such as the pages loaded so far.

    Raises:
        OSError: the program cannot be started.
    """
    process = tied_child(command, stdout=subprocess.PIPE)
    loop = asyncio.get_running_loop()
    to_engine, _ = await loop.connect_write_pipe(asyncio.Protocol, process.stdin)
    link = EngineLink(to_engine.write, on_starting)
    from_engine, _ = await loop.connect_read_pipe(lambda: _FromEngine(process, link), process.stdout)
    try:
        yield Child(process, link)
    finally:
        link.end()
        to_engine.close()
        try:
            await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        from_engine.close()


class _FromEngine(asyncio.Protocol):
    """asyncio protocol that passes the engine's output on to the link."""

    def __init__(self, process: subprocess.Popen[bytes], link: EngineLink) -> None:
        self._process = process
        self._link = link

    def data_received(self, data: bytes) -> None:
        try:
            self._link.feed(data)
        except BadServerFrame as error:
            self._process.kill()  # nobody understands it any more
            self._link.end(f"it wrote {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._link.ended.done():
            end = asyncio.get_running_loop().run_in_executor(None, end_of, self._process)
            end.add_done_callback(lambda done: self._link.end(done.result()))


def end_of(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a process whose output is closed, and return in words how it ended.

    If it goes on for more than `PATIENCE_SECONDS`, it is killed.
    """
    try:
        code = process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return "its process says nothing more"
    if code == -signal.SIGKILL:
        return "its process was killed, as the system does where memory runs out"
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
