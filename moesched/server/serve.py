"""Serving of a model: starts the engine's process, answers HTTP, and ends both in order at a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from moesched.errors import BadInput, MoeschedError
from moesched.inputs.chat_template import find_chat_template
from moesched.inputs.tokenizer import find_tokenizer
from moesched.server.child import Child, engine_child
from moesched.server.codec import Codec, Numbers
from moesched.server.errors import EngineFailed
from moesched.server.front import Front
from moesched.server.gate import Gate
from moesched.server.messages import Ready, Starting
from moesched.server.model import Model
from moesched.server.options import FrontOptions
from moesched.server.protocol import TimedProtocol
from moesched.server.templates import rendering
from moesched.system.own_loop import run_on_own_loop
from moesched.system.signals import stopped_by

ENGINE = (sys.executable, "-P", "-m", "moesched.server.engine")
BACKLOG = 2048
"""Number of clients that may wait until their connection is accepted."""
OPEN_MAX = 10_240
"""The most open files that macOS lets a process ask for; its hard limit reads as infinite, but may not be asked for."""
CLOSING_SECONDS = 5
"""Seconds that connections have to close after the last answer."""
IDLE_SECONDS = 75
"""Seconds that a connection waits for its next request. Clients and proxies usually close theirs sooner: a request that
is sent just as the server closes the connection would get no answer."""


class ServerCallbacks(NamedTuple):
    """Callbacks of a server.

    Attributes:
        starting: called with each message of the engine before it is ready.
        ready: called once with the server's address, the engine's message that it is ready, and notes on the model.
        closing: called once no more requests are taken, with the number of answers that still run or wait.
    """

    starting: Callable[[Starting], object]
    ready: Callable[[str, Ready, Notes], object]
    closing: Callable[[int], object]


class Notes(NamedTuple):
    """Two facts about a model: whether it has a tokenizer, and whether it has a chat template."""

    has_tokenizer: bool
    has_template: bool


def serve(model: Path, given: FrontOptions, engine: Sequence[str], callbacks: ServerCallbacks) -> bool:
    """Serve a model until a signal comes; then take no more requests, and complete those that have come.

    Args:
        engine: the command that starts the engine.

    Returns:
        False if a signal came before the server was ready, else True.

    Raises:
        BadInput: an option or the model cannot be used.
        MoeschedError: the engine failed.
    """
    key = given.key()
    tokenizer, template = find_tokenizer(model), find_chat_template(model)
    notes = Notes(tokenizer is not None, template is not None)
    many_connections()
    with listening(given.host, given.port) as listener_socket:

        async def run() -> bool:
            closing = asyncio.Event()
            loop = asyncio.get_running_loop()
            with stopped_by(partial(loop.call_soon_threadsafe, closing.set)):
                async with AsyncExitStack() as opened:
                    renders = await opened.enter_async_context(rendering(template))
                    child = await opened.enter_async_context(engine_child(engine, callbacks.starting))
                    ready = await _ready(child, closing)
                    if ready is None:
                        return False
                    codec: Codec = tokenizer or Numbers()
                    served = Model(
                        ready, codec, renders, chat_tokens=given.max_tokens, loaded=int(time.time())
                    )
                    gate = Gate(ready.places * ready.sequences, given.queue)
                    front = Front(served, child.link, gate, key)
                    say = partial(callbacks.ready, url_of(listener_socket), ready, notes)
                    server = SignalFreeServer(front.app, listener_socket, say, given.proxies)
                    await _serve_until(closing, server, front, child, callbacks.closing)
                    return True

        return run_on_own_loop(run)


async def _ready(child: Child, closing: asyncio.Event) -> Ready | None:
    """Wait until the engine has loaded the model; None if a signal sets `closing` before.

    Raises:
        BadInput: the engine cannot use an option or the model.
        MoeschedError: the engine failed.
    """
    signal = asyncio.ensure_future(closing.wait())
    either: list[asyncio.Future[Any]] = [signal, child.link.ready]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    signal.cancel()
    if not child.link.ready.done():
        return None
    if child.link.ready.exception() is None:
        return child.link.ready.result()
    raise _failure(await child.exit_code(), child.link.ended.result())


def _failure(code: int, why: str) -> MoeschedError:
    """Return the error for an engine that failed for the reason `why`: BadInput for code 2, EngineFailed for others."""
    return BadInput(why) if code == 2 else EngineFailed(why)


async def _serve_until(
    closing: asyncio.Event,
    server: SignalFreeServer,
    front: Front,
    child: Child,
    on_closing: Callable[[int], object],
) -> None:
    """Serve until `closing` is set and all answers have been given.

    Args:
        on_closing: called once no more requests are taken, with the number of answers still to be given.

    Raises:
        EngineFailed: the engine ended by itself.
    """
    serving = asyncio.ensure_future(server.serve_clients())
    asked_to_close = asyncio.ensure_future(closing.wait())
    ended = child.link.ended
    any_of: list[asyncio.Future[Any]] = [asked_to_close, ended, serving]
    await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
    failed = ended.done()
    if not failed:
        on_closing(front.gate.inside)
        await front.gate.drained()
        failed = ended.done()
        child.link.close()
    asked_to_close.cancel()
    server.should_exit = True
    await serving
    if failed:
        raise EngineFailed(ended.result())
    why = await ended
    if code := await child.exit_code():
        raise _failure(code, why)


class SignalFreeServer(uvicorn.Server):
    """uvicorn's server without its handlers of signals, since the program has its own.

    Args:
        app: the application that answers.
        listener_socket: the socket to which clients connect.
        on_listening: called once the server listens.
        proxies: addresses of proxies, whose header X-Forwarded-For is taken for the client's address.
    """

    capture_signals = nullcontext  # type: ignore[assignment]  # a context manager as well

    def __init__(
        self,
        app: ASGIApp,
        listener_socket: socket.socket,
        on_listening: Callable[[], object],
        proxies: Sequence[str] = (),
    ) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(
            uvicorn.Config(
                app,
                http=TimedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=[*proxies],
                backlog=BACKLOG,
                timeout_graceful_shutdown=CLOSING_SECONDS,
                timeout_keep_alive=IDLE_SECONDS,
            )
        )
        self._socket = listener_socket
        self._on_listening = on_listening

    async def serve_clients(self) -> None:
        """Answer clients until `should_exit` is set."""
        await self.serve(sockets=[self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen on `sockets`, and call `on_listening`."""
        await super().startup(sockets)
        self._on_listening()


# ---------------------------------------------------------------- sockets


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen at `host` and `port` until the context ends; clients that connect before the server is ready wait.

    Raises:
        BadInput: the address is not this machine's, or the port is in use.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"--host {host}: {error}: give an address of this machine") from error
    with opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(address)
            opened.listen(BACKLOG)  # now: two servers that only bind may have the same port
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            remedy = "give another --port, or 0 for a free one" if in_use else "give another --host or --port"
            raise BadInput(f"cannot listen at {host} port {port}: {error.strerror}: {remedy}") from error
        yield opened


def url_of(listener_socket: socket.socket) -> str:
    """Return the URL of a server by its listening socket."""
    host, port, *_ = listener_socket.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def many_connections() -> None:
    """Let this process open as many connections as the system permits it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_MAX if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
