"""The server's limits: who may ask, how many at once, what happens when someone leaves, and what is told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from starlette.types import Message

from fronts import CHAT, HELLO, Server, chat, front
from moesched.server.bodies import MOST_BYTES
from moesched.server.fields import MOST_CHOICES
from moesched.server.generation import AnswerPiece
from moesched.server.link import IDLE
from moesched.server.messages import LENGTH, Frames, ToEngine
from moesched.server.metrics import Metrics
from moesched.server.templates import PlainTemplate
from patience import PATIENCE_SECONDS


@asynccontextmanager
async def held(
    server: Server, requests: int, max_tokens: int
) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Answers that begin, and get their tokens at the end of the context."""
    server.engine.held = True
    running = [asyncio.ensure_future(chat(server, max_tokens=max_tokens)) for _ in range(requests)]
    while server.front.gate.inside < requests:
        await asyncio.sleep(0)
    yield running
    server.engine.held = False
    server.engine.resume()


# ---------------------------------------------------------------- keys and limits


async def test_a_key_is_asked_for_where_the_server_has_one() -> None:
    async with front(key="secret") as server:
        wrong = server.openai.with_options(api_key="guess")
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
        assert (await server.openai.models.list()).data[0].id == "fake"
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/metrics")).status_code == 401
        for host in ("[", "example.org"):
            shown = {"authorization": "bearer secret", "host": host}
            assert (await server.http.get("/nowhere/", headers=shown)).status_code == 404


async def test_without_a_key_other_names_of_this_machine_are_refused(server: Server) -> None:
    for host, status in [("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("example.org", 403), ("[", 403)]:
        response = await server.http.get("/v1/models", headers={"host": host})
        assert response.status_code == status, host


async def test_a_full_server_says_when_to_come_again() -> None:
    async with front(most=2) as server:
        async with held(server, 2, max_tokens=2) as running:
            with pytest.raises(openai.RateLimitError) as caught:
                await chat(server)
            assert int(caught.value.response.headers["retry-after"]) >= 1
        assert [answer.usage.completion_tokens for answer in await asyncio.gather(*running)] == [2, 2]
        assert server.front.gate.inside == 0


async def test_a_full_server_reads_no_bodies() -> None:
    async with front(most=1) as server:
        async with held(server, 1, max_tokens=1) as running:
            client = Client(b"no JSON")
            await client.ask(server)
            assert client.status == 429
        await running[0]


async def test_a_server_that_closes_takes_no_more_and_ends_what_runs(server: Server) -> None:
    async with held(server, 1, max_tokens=2) as running:
        drained = asyncio.ensure_future(server.front.gate.drained())
        await asyncio.sleep(0)
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(server)
        assert caught.value.status_code == 503
        assert (await server.http.get("/health")).status_code == 503
        assert not drained.done()
    await drained
    assert (await running[0]).usage.completion_tokens == 2


class Client:
    """A client as ASGI sees it: it sends a body, and may go away."""

    def __init__(self, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.left = asyncio.Event()
        self.got: list[Message] = []
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._sent = False
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
        }

    async def receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.got.append(message)

    async def ask(self, server: Server) -> None:
        await server.front.app(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        status: int = self.got[0]["status"]
        return status


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_is_told_at_once_that_a_client_left(stream: bool, server: Server) -> None:
    server.engine.held = True
    client = Client({"model": "fake", "messages": HELLO, "n": 2, "stream": stream})
    asking = asyncio.ensure_future(client.ask(server))
    while len(server.engine.asked) < 2 and not asking.done():
        await asyncio.sleep(0)
    client.left.set()
    await asking
    assert server.engine.left == [0, 1]
    assert server.front.gate.inside == 0


async def test_a_body_that_is_too_long_is_refused_before_it_comes(server: Server) -> None:
    client = Client(b"", headers=[(b"content-length", b"100000000")])
    await client.ask(server)
    assert client.status == 413


def test_the_longest_body_with_the_most_answers_fits_into_a_frame_to_the_engine() -> None:
    assert [*Frames(ToEngine).feed(LENGTH.pack(MOST_BYTES * MOST_CHOICES))] == [], "the rest is waited for"


@pytest.mark.parametrize(
    ("headers", "remedy"),
    [
        ({"content-type": "text/plain"}, "Content-Type: application/json"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "without Content-Encoding"),
    ],
    ids=["text", "gzip"],
)
async def test_a_body_that_is_not_said_to_be_plain_json_is_refused(
    headers: dict[str, str], remedy: str, server: Server
) -> None:
    response = await server.http.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert remedy in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_ends_ends_the_answers(stream: bool, server: Server) -> None:
    server.engine.held = True
    asking = asyncio.ensure_future(chat(server, stream=stream))
    while not server.engine.asked:
        await asyncio.sleep(0)
    server.link.end("its process has ended")
    with pytest.raises(openai.InternalServerError, match="the engine has ended: its process has ended"):
        await asking
    with pytest.raises(openai.InternalServerError):
        await chat(server)
    assert (await server.http.get("/health")).status_code == 503


async def test_an_engine_that_ends_within_a_stream_is_an_event_of_it(server: Server) -> None:
    class AtItsFirstPiece(Client):
        async def send(self, message: Message) -> None:
            await super().send(message)
            if message["type"] == "http.response.body":
                server.link.end("its process has ended")

    client = AtItsFirstPiece({"model": "fake", "messages": HELLO, "stream": True})
    await client.ask(server)
    start, _, error, last = client.got
    assert start["status"] == 200
    assert b"the engine has ended: its process has ended" in error["body"]
    assert not last.get("more_body", False)


async def test_an_answer_that_the_engine_breaks_off_is_an_error_and_others_are_answered(
    server: Server,
) -> None:
    server.engine.breaks = "the logits are not finite"
    with pytest.raises(openai.InternalServerError, match="the logits are not finite"):
        await chat(server)
    stream = await chat(server, stream=True)
    assert (await anext(stream)).choices[0].delta.content
    with pytest.raises(openai.APIError, match="the logits are not finite"):
        await anext(stream)
    assert server.front.gate.inside == 0
    server.engine.breaks = ""
    assert (await chat(server)).choices[0].message.content


async def test_a_client_that_leaves_while_its_chat_is_rendered_frees_its_place() -> None:
    class NeverDone(PlainTemplate):
        begun = False

        async def render(self, messages: Any) -> str:
            self.begun = True
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never

    template = NeverDone()
    async with front(template=template) as server:
        client = Client({"model": "fake", "messages": HELLO})
        asking = asyncio.ensure_future(client.ask(server))
        while not template.begun:
            await asyncio.sleep(0)
        client.left.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asking
        assert server.front.gate.inside == 0
        assert not client.got and not server.engine.asked


class Pieces:
    """Two answers of three tokens each, one after the other, a token each second after the fourth."""

    answers, answer_tokens = 2, 6

    def __init__(self) -> None:
        self.now = 0.0

    async def pieces(self) -> AsyncGenerator[list[AnswerPiece]]:
        for token in range(6):
            self.now = 4.0 + token
            yield [AnswerPiece(token // 3, "a", [], None)]


async def test_the_time_per_token_is_that_of_each_answer_and_the_first_counts_from_the_request() -> None:
    generation: Any = Pieces()
    metrics = Metrics(lambda: IDLE, lambda: generation.now)
    assert [piece async for piece in metrics.observed(generation, 1.0)]
    text = metrics.text().decode()
    assert "moesched_time_to_first_token_seconds_sum 3.0" in text
    assert "moesched_time_per_token_seconds_sum 1.0" in text


async def test_metrics_count_requests_and_tokens(server: Server) -> None:
    await chat(server, max_tokens=3)
    await server.http.get("/v2/" + "x" * 50)
    text = (await server.http.get("/metrics")).text
    assert "moesched_answer_tokens_total 3.0" in text
    assert 'moesched_responses_total{path="/v1/chat/completions",status="200"} 1.0' in text
    assert 'moesched_responses_total{path="other",status="404"} 1.0' in text
    assert "moesched_time_to_first_token_seconds_count 1.0" in text
    assert "moesched_time_per_token_seconds_count 1.0" in text
    assert 'moesched_lane_busy_seconds{lane="disk"} 0.25' in text


async def test_the_state_of_the_engine_is_told(server: Server) -> None:
    await chat(server, max_tokens=1)
    state = (await server.http.get("/state")).json()
    assert state["busy"] == {"cpu": 0.5, "disk": 0.25}
    assert state["room"] == 2048 and state["policy"] == "resident"
