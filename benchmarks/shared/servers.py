"""A server as a process, and requests to it by bare sockets, which cost little beside what is measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"


class Server(NamedTuple):
    """A running server: its process, and the port at 127.0.0.1."""

    process: psutil.Process
    port: int


@contextmanager
def running(command: Sequence[str]) -> Iterator[Server]:
    """Run a command that prints a server's address at the end of a line; SIGTERM ends it.

    Raises:
        SystemExit: it ends otherwise than in order.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().rpartition(":")[2])
            yield Server(psutil.Process(process.pid), port)
            process.terminate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")


async def connected(
    port: int, body: dict[str, Any] | bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and send a request for a completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(body))
    return reader, writer


def request(body: dict[str, Any] | bytes) -> bytes:
    """A request for a completion, as it is sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data


def memory_of(front: psutil.Process) -> dict[str, int]:
    """Resident bytes of the front and of the engine."""
    [engine] = front.children()
    return {"front": front.memory_info().rss, "engine": engine.memory_info().rss}


async def idle_state(port: int) -> dict[str, int]:
    """The engine's state once nothing runs."""
    while True:
        state: dict[str, int] = json.loads(await page(port, "/state"))
        if not state["running"] and not state["waiting"]:
            return state
        await asyncio.sleep(0.1)


async def page(port: int, path: str) -> bytes:
    """The body of a page."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return body
