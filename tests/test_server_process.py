"""The server as it runs: its sockets, the limits of its connections, the engine's process, and signals."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import openai
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from fronts import CHAT, SAYS, TINY, front, tiny_tokenizer
from moesched.errors import BadInput, MoeschedError
from moesched.server.errors import ApiError
from moesched.server.link import EngineLink
from moesched.server.options import FrontOptions
from moesched.server.protocol import TimedProtocol
from moesched.server.serve import ServerCallbacks, SignalFreeServer, listening, serve
from patience import PATIENCE_SECONDS
from served_processes import engine, server

IGNORE = ServerCallbacks(lambda starting: None, lambda url, ready, notes: None, lambda answers: None)


def test_the_unmodified_client_is_answered_and_a_signal_ends_the_server_once_its_answers_are_given(
    tmp_path: Path,
) -> None:
    says = tiny_tokenizer().encode(SAYS, bare=True)
    lock = tmp_path / "lock"
    with lock.open("w") as file, server(says=says, lock=lock) as (process, url):
        client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        messages: Any = [{"role": "user", "content": "Hello"}]
        whole = client.chat.completions.create(model="fake", messages=messages, max_tokens=len(says))
        assert whole.choices[0].message.content == SAYS
        fcntl.flock(file, fcntl.LOCK_EX)
        stream = client.chat.completions.create(
            model="fake", messages=messages, max_tokens=len(says), stream=True
        )
        pieces = [next(iter(stream))]
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == "1\n", (
            "one answer ran when the signal came"
        )
        fcntl.flock(file, fcntl.LOCK_UN)
        pieces += stream
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == SAYS
        client.close()
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("code", "kind"), [(2, BadInput), (1, MoeschedError)], ids=["for its input", "for another reason"]
)
def test_an_engine_that_does_not_begin_ends_the_server_with_its_line(
    code: int, kind: type[Exception]
) -> None:
    failing = engine(fails="the plan does not fit: lower --batch-size", code=code)
    with pytest.raises(kind, match="the plan does not fit: lower --batch-size"):
        serve(TINY, FrontOptions(port=0), failing, IGNORE)


def test_a_server_whose_engine_fails_at_its_end_fails_too() -> None:
    with server(fails_at_the_end="cannot write trace served.json") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("exit 3", "ended with exit code 3"),
        ("kill -9 $$", "was killed"),
        ("kill -15 $$", "ended by signal 15"),
    ],
)
def test_an_engine_that_dies_without_a_word_is_named_with_its_end(ends: str, says: str) -> None:
    with pytest.raises(MoeschedError, match=f"the engine has ended: its process {says}"):
        serve(TINY, FrontOptions(port=0), ["sh", "-c", ends], IGNORE)


def test_an_engine_that_cannot_be_understood_and_goes_on_is_ended() -> None:
    with pytest.raises(MoeschedError, match="the engine has ended: it wrote a frame of 4294967295 bytes"):
        serve(TINY, FrontOptions(port=0), ["sh", "-c", r"printf '\377\377\377\377'; exec sleep 1000"], IGNORE)


async def test_an_engine_that_is_ended_before_it_is_ready_leaves_nothing_to_complain_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    EngineLink(lambda data: None).end()
    gc.collect()
    assert caplog.messages == []


# ---------------------------------------------------------------- addresses and keys


def test_a_port_is_taken_from_the_beginning() -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port}: Address already in use: give another --port"):
            with listening("127.0.0.1", port):
                pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(BadInput, match=r"cannot listen at 192\.0\.2\.1 port 0"):
        with listening("192.0.2.1", 0):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_beyond_loopback_a_key_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESCHED_API_KEY", raising=False)
    with pytest.raises(BadInput, match=f"--host {host} lets others in: set a key"):
        FrontOptions(host=host).key()
    monkeypatch.setenv("MOESCHED_API_KEY", "secret")
    assert FrontOptions(host=host).key() == "secret"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_none_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESCHED_API_KEY", raising=False)
    assert FrontOptions(host=host).key() is None


def test_a_key_in_a_file_comes_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESCHED_API_KEY", "other")
    (tmp_path / "key").write_text("secret\n")
    assert FrontOptions(api_key_file=tmp_path / "key").key() == "secret"


@pytest.mark.parametrize("content", ["", " \n", "two words", "schlüssel"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content, "utf-8")
    with pytest.raises(BadInput, match="has no key"):
        FrontOptions(api_key_file=tmp_path / "key").key()


# ---------------------------------------------------------------- slow clients

LONG = b"x" * (1 << 16)
PIECES = 200


class HastyReader(TimedProtocol):
    """Connections that wait for a request with little patience."""

    request_seconds = 0.2


class HastyWriter(TimedProtocol):
    """Connections that wait for a reader with little patience."""

    write_seconds = 0.05


class HastyDropper(TimedProtocol):
    """Connections that drop little of a request that has its answer."""

    most_dropped = len(LONG)


async def long_answer(scope: Scope, receive: Receive, send: Send) -> None:
    """An application whose answers are larger than the buffers of a socket."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(PIECES):
        await send({"type": "http.response.body", "body": LONG, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


TOO_LONG = ApiError(413, "the body is too long").response()
"""An application that answers before the body has come."""

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def connected(
    protocol: type[TimedProtocol] = TimedProtocol, application: ASGIApp = long_answer
) -> AsyncIterator[tuple[Connect, ServerState]]:
    """Serve an application; gives a function that connects to it, and the state of its server."""
    config = uvicorn.Config(application, lifespan="off", log_config=None, ws="none")
    state = ServerState()
    loop = asyncio.get_running_loop()
    serving = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    try:
        yield partial(asyncio.open_connection, *serving.sockets[0].getsockname()), state
    finally:  # what stays open would keep uvloop from ending
        serving.close()
        for connection in state.connections:
            connection.transport.abort()


BEGINS = {
    "nothing": b"",
    "half a header": b"GET / HT",
    "half a body": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc",
}


@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
async def test_a_client_that_sends_no_whole_request_is_closed(begin: bytes) -> None:
    async with connected(HastyReader) as (connect, state):
        opened = []
        for _ in range(20):
            reader, writer = await connect()
            writer.write(begin)
            opened.append((reader, writer))
        for reader, writer in opened:
            assert await reader.read() == b""
            writer.close()
        assert not state.connections


NOT_HTTP = {
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "long headers": b"GET / HTTP/1.1\r\nHost: a\r\nLong: " + b"a" * 70_000,
    "a length below 0": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "a chunk without a length": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
}


async def refusal_of(sent: bytes, application: ASGIApp = long_answer) -> tuple[bytes, Any]:
    """The head of the answer to a request, and the error in its body."""
    async with connected(application=application) as (connect, _):
        reader, writer = await connect()
        writer.write(sent)
        await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    return head, json.loads(body)["error"]


@pytest.mark.parametrize("sent", NOT_HTTP.values(), ids=NOT_HTTP)
async def test_what_is_no_http_is_refused_in_openais_form(sent: bytes) -> None:
    head, error = await refusal_of(sent)
    assert head.startswith(b"HTTP/1.1 400")
    assert error["type"] == "invalid_request_error"


async def test_a_body_of_two_lengths_is_refused_and_its_connection_closed() -> None:
    sent = (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\n\r\n" % CHAT.encode()
    )
    async with front() as server:
        head, error = await refusal_of(sent, server.front.app)
    assert head.startswith(b"HTTP/1.1 400")
    assert "send either Content-Length or Transfer-Encoding" in error["message"]


Connection = tuple[SignalFreeServer, asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection_to(app: ASGIApp, proxies: tuple[str, ...] = ()) -> AsyncIterator[Connection]:
    """A server of an application that runs until the context ends, and a connection to it."""
    listens = asyncio.Event()
    with listening("127.0.0.1", 0) as socket:
        running = SignalFreeServer(app, socket, listens.set, proxies)
        serving = asyncio.ensure_future(running.serve_clients())
        await listens.wait()
        reader, writer = await asyncio.open_connection(*socket.getsockname())
        try:
            yield running, reader, writer
        finally:
            running.should_exit = True
            writer.close()
            await serving


async def test_a_request_that_has_not_come_as_a_whole_when_the_server_ends_is_refused() -> None:
    async with front() as answering, connection_to(answering.front.app) as (running, reader, writer):
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n" % CHAT.encode()
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await answering.front.gate.drained()
        running.should_exit = True
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 10" in head.lower()
    assert json.loads(body)["error"]["type"] == "server_error"
    assert not running.server_state.tasks


async def test_a_connection_stays_open_for_longer_than_proxies_keep_theirs() -> None:
    async with connection_to(says_the_client) as (running, reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"127.0.0.1")
        [connection] = running.server_state.connections
        assert isinstance(connection, TimedProtocol)
        timer = connection.timeout_keep_alive_task
        assert timer is not None
        assert timer.when() - asyncio.get_running_loop().time() > 60


async def says_the_client(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with the client's address."""
    await Response(scope["client"][0])(scope, receive, send)


@pytest.mark.parametrize(
    ("proxies", "client"),
    [
        ((), b"127.0.0.1"),
        (("127.0.0.1",), b"192.0.2.7"),
        (("127.0.0.0/8", "::1"), b"192.0.2.7"),
        (("::1",), b"127.0.0.1"),
    ],
)
async def test_only_a_proxy_that_was_named_says_who_its_client_is(
    proxies: tuple[str, ...], client: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with connection_to(says_the_client, FrontOptions(proxies=proxies).proxies) as (_, reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.7\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"\r\n\r\n" + client)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost:8000/v1/models", b"200"),
        (b"HTTP://localhost/v1/models/fake?a=b", b"200"),
        (b"http://localhost", b"200"),
        (b"http://example.org/v1/models", b"403"),
        (b"ftp://localhost/v1/models", b"404"),
    ],
)
async def test_a_target_may_be_a_url_whose_host_counts(target: bytes, status: bytes) -> None:
    async with front() as server, connected(application=server.front.app) as (connect, _):
        reader, writer = await connect()
        writer.write(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % target)
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
        writer.close()


@pytest.mark.parametrize("more", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
async def test_a_client_that_leaves_is_noticed_also_if_it_has_sent_more(more: bytes) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def until_it_leaves(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        asked.set()
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async with connected(application=until_it_leaves) as (connect, _):
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asked.wait()
        writer.write(more)
        writer.close()
        await asyncio.wait_for(left.wait(), PATIENCE_SECONDS)


async def test_a_client_that_does_not_read_is_closed() -> None:
    async with connected(HastyWriter) as (connect, state):
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        while not state.connections:
            await asyncio.sleep(0)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # the transport reads as well
        while state.connections:
            await asyncio.sleep(0.01)
        writer.close()


async def test_a_client_that_reads_is_given_the_whole_answer() -> None:
    async with connected() as (connect, _):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).count(b"x") == PIECES * len(LONG)
        writer.close()


@pytest.mark.parametrize("leaves", [False, True], ids=["its answer read", "left before"])
async def test_a_connection_that_has_ended_leaves_nothing_to_the_garbage_collector(leaves: bool) -> None:
    made: list[ref[TimedProtocol]] = []

    class Watched(TimedProtocol):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            made.append(ref(self))

    gc.disable()
    try:
        async with connected(Watched) as (connect, state):
            reader, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await (reader.readexactly(10) if leaves else reader.read())
            writer.close()
            await writer.wait_closed()
            while state.connections or state.tasks:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [each() for each in made] == [None]
    finally:
        gc.enable()


def head_of(length: int) -> bytes:
    """The head of a request with a body of a length, and the last one of its connection."""
    return b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % length


LATE = {
    "a body": (head_of(PIECES * len(LONG)) + PIECES * LONG, b"HTTP/1.1 413", "the body is too long"),
    "headers": (b"GET / HTTP/1.1\r\nLong: " + PIECES * LONG, b"HTTP/1.1 400", "longer than 64 KiB"),
}


@pytest.mark.parametrize(("sent", "status", "says"), LATE.values(), ids=LATE)
async def test_a_client_that_sends_all_of_it_first_is_given_the_answer_that_came_before(
    sent: bytes, status: bytes, says: str
) -> None:
    head, error = await refusal_of(sent, TOO_LONG)
    assert head.startswith(status)
    assert says in error["message"]


async def test_bytes_after_an_early_answer_are_counted_on_connections_that_stay_open() -> None:
    async with connected(HastyDropper, TOO_LONG) as (connect, state):
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
        async with asyncio.timeout(HastyDropper.request_seconds / 2):
            while state.connections:
                writer.write(LONG)
                await asyncio.sleep(0.01)
        writer.close()


@pytest.mark.parametrize(
    ("protocol", "sent", "more"),
    [
        (HastyReader, head_of(1 << 30), b""),
        (HastyReader, b"\0\r\n\r\n", b""),
        (HastyDropper, head_of(1 << 30), LONG),
    ],
    ids=["its time", "the time of what is no HTTP", "its bytes"],
)
async def test_a_client_that_has_its_answer_is_waited_for_within_limits(
    protocol: type[TimedProtocol], sent: bytes, more: bytes
) -> None:
    now = asyncio.get_running_loop().time
    async with connected(protocol, TOO_LONG) as (connect, state):
        began = now()
        reader, writer = await connect()
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 4")
        assert state.connections or now() - began > 0.9 * protocol.request_seconds, "it may still send"
        async with asyncio.timeout(PATIENCE_SECONDS):
            while state.connections:
                writer.write(more)
                await asyncio.sleep(0.01)
        writer.close()
