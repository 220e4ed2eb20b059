"""Endpoints that generate text: they read a request, ask the engine, and send the answer whole or as a stream."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from moesched.server.bodies import read_body, read_bytes
from moesched.server.errors import ApiError, ClientLeft, bad_request
from moesched.server.fields import ChatRequest, CompletionRequest, Generated
from moesched.server.forms import ChatForm, CompletionForm, Form, gathered
from moesched.server.gate import Gate
from moesched.server.generation import AnswerPiece, AnswersInProgress, Prompt, Wanted
from moesched.server.link import EngineLink
from moesched.server.metrics import Metrics
from moesched.server.model import Model
from moesched.server.replies import Usage, usage

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

Given = TypeVar("Given", bound=Generated)
_json = msgspec.json.Encoder()


class CheckedRequest(NamedTuple):
    """A request that was read and checked: its prompts, the settings of their answers, and the form of the response."""

    prompts: Sequence[Prompt]
    wanted: Wanted
    form: Form


class Endpoint(ABC, Generic[Given]):
    """An endpoint that generates text, as an ASGI application.

    Args:
        model: the model that is served.
        link: the link to the engine's process.
        gate: limits the number of answers that run or wait.
        metrics: counts tokens, and measures the time to a request's first token and the mean time between tokens.
    """

    kind: type[Given]

    def __init__(self, model: Model, link: EngineLink, gate: Gate, metrics: Metrics) -> None:
        self.model = model
        self._link = link
        self._gate = gate
        self._metrics = metrics

    @abstractmethod
    async def understand(self, given: Given, user: str) -> CheckedRequest:
        """Check a request's fields, and make its prompts, its settings and the form of its response from them.

        Args:
            given: the request's fields.
            user: name of the user who sent the request, for the admission rule.

        Raises:
            ApiError: a field cannot be used.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; arguments are as for any ASGI application."""
        request, came = Request(scope, receive), self._metrics.clock()
        try:
            self._gate.require_room()  # before the work of reading, since a full server refuses many
            given = read_body(await read_bytes(request), self.kind, self.model.name)
            self.model.require(given.model)
            user = given.user or (request.client.host if request.client else "")
            with self._gate.entered(given.answers, given.answers_field):
                asked = await _unless_left(self.understand(given, user), receive)
                generation = AnswersInProgress(self._link, self.model.codec, asked.prompts, asked.wanted)
                with _left_when_over(generation, receive), self._metrics.counted(generation):
                    pieces = self._metrics.observed(generation, came)
                    await self._answer(given, asked, generation, pieces, send)
        except ClientLeft:
            pass  # nobody reads an answer

    async def _answer(
        self,
        given: Given,
        asked: CheckedRequest,
        generation: AnswersInProgress,
        observed: AsyncGenerator[list[AnswerPiece]],
        send: Send,
    ) -> None:
        async with aclosing(observed) as pieces:
            if not given.stream:
                parts = [piece async for several in pieces for piece in several]
                answers = gathered(parts, given.answers)
                body = _json.encode(asked.form.whole(answers, _usage(generation)))
                await _send_whole(send, body)
                return
            events = _events(pieces, asked.form, generation, with_usage=given.streams_usage)
            await _send_stream(send, events)


class Completions(Endpoint[CompletionRequest]):
    """The endpoint /v1/completions."""

    kind = CompletionRequest

    async def understand(self, given: CompletionRequest, user: str) -> CheckedRequest:
        """Encode the prompts of a completion request from `user`, and check its settings."""
        prompt_only = given.max_tokens == 0
        if prompt_only and not given.echo:
            raise bad_request("max_tokens is 0: give 1 or more, or echo with it", "max_tokens")
        prompts = [await self._prompt(each) for each in given.prompts]
        wanted = Wanted(
            new_tokens=self.model.answer_tokens(given.max_tokens, prompts, chat=False),
            logprobs=given.logprobs,
            scores_stop_token=True,
            echo=bool(given.echo),
            prompt_only=prompt_only,
            **_settings(given, user),
        )
        form = CompletionForm(
            self.model.name,
            self.model.codec,
            scored=given.logprobs is not None,
            with_usage=given.streams_usage,
        )
        return CheckedRequest(prompts, wanted, form)

    async def _prompt(self, prompt: str | Sequence[int]) -> Prompt:
        return await self.model.of_text(prompt) if isinstance(prompt, str) else self.model.of_ids(prompt)


class Chats(Endpoint[ChatRequest]):
    """The endpoint /v1/chat/completions."""

    kind = ChatRequest

    async def understand(self, given: ChatRequest, user: str) -> CheckedRequest:
        """Encode the conversation of a chat request from `user` as a prompt, and check its settings."""
        if given.top_logprobs and not given.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        prompt = await self.model.of_chat([_for_template(message) for message in given.messages])
        wanted = Wanted(
            new_tokens=self.model.answer_tokens(given.most_tokens, [prompt], chat=True),
            logprobs=(given.top_logprobs or 0) if given.logprobs else None,
            **_settings(given, user),
        )
        form = ChatForm(
            self.model.name, self.model.codec, scored=bool(given.logprobs), with_usage=given.streams_usage
        )
        return CheckedRequest([prompt], wanted, form)


def _for_template(message: Any) -> dict[str, Any]:
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.text, **named}


def _settings(given: Generated, user: str) -> dict[str, Any]:
    """Convert the fields that completions and chats share to keyword arguments of `Wanted`."""
    return {
        "answers": given.n or 1,
        "temperature": 1.0 if given.temperature is None else given.temperature,
        "top_k": given.top_k,
        "top_p": 1.0 if given.top_p is None else given.top_p,
        "seed": None if given.seed is None else given.seed % 2**63,
        "stops": given.stops,
        "user": user,
    }


def _usage(generation: AnswersInProgress) -> Usage:
    return usage(generation.prompt_tokens, generation.answer_tokens)


# ---------------------------------------------------------------- HTTP


@contextmanager
def _left_when_over(generation: AnswersInProgress, receive: Receive) -> Iterator[None]:
    """Stop the generation when the client closes the connection, and when the context ends."""
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    watcher.add_done_callback(lambda _: generation.leave())
    try:
        yield
    finally:
        watcher.cancel()
        generation.leave()


async def _unless_left(checking: Coroutine[Any, Any, CheckedRequest], receive: Receive) -> CheckedRequest:
    """Await a coroutine and return its result; cancel it if the client closes the connection meanwhile.

    Raises:
        ClientLeft: the client has closed the connection.
    """
    checked, watcher = asyncio.ensure_future(checking), asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait([checked, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not checked.done():
            raise ClientLeft
        return checked.result()
    finally:
        checked.cancel()
        watcher.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_stream(send: Send, events: AsyncIterator[bytes]) -> None:
    """Send events as they come; an error before the first event is raised, a later one is sent as an event."""
    begun = False
    try:
        async for data in events:
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except ApiError as error:
        if not begun:
            raise
        await send({"type": "http.response.body", "body": b"data: %b\n\n" % error.body(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _events(
    pieces: AsyncIterator[list[AnswerPiece]], form: Form, generation: AnswersInProgress, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield a stream's server-sent events as bytes, with the token counts at the end if `with_usage`."""
    async for several in pieces:
        told = [each for each in several if each.text or each.tokens or each.ending]
        if told:
            yield b"".join(_event(form.chunk(each)) for each in told)
    if with_usage:
        yield _event(form.last(_usage(generation)))
    yield DONE


def _event(content: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % _json.encode(content)
