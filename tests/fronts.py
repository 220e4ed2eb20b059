"""The front of a server before a fake engine, in one process, and OpenAI's own client to ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from openai import AsyncOpenAI

from fake_engine import FakeEngine
from moesched.inputs.tokenizer import Tokenizer, find_tokenizer
from moesched.server.codec import Codec
from moesched.server.front import Front
from moesched.server.gate import Gate
from moesched.server.link import EngineLink
from moesched.server.model import Model
from moesched.server.templates import PlainTemplate, Renders

TINY = Path(__file__).resolve().parent.parent / "examples" / "tiny-mixtral"
CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
SAYS = "The answer: é 🙂 is, of course, forty-two."


class Server(NamedTuple):
    """A front, its engine, and clients of it."""

    front: Front
    engine: FakeEngine
    link: EngineLink
    http: httpx2.AsyncClient
    openai: AsyncOpenAI


@cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of examples/tiny-mixtral."""
    return tokenizer_of(TINY)


def tokenizer_of(model: Path) -> Tokenizer:
    """The tokenizer of a model that has one."""
    tokenizer = find_tokenizer(model)
    assert tokenizer is not None
    return tokenizer


@asynccontextmanager
async def front(
    *,
    says: str = SAYS,
    most: int = 8,
    key: str | None = None,
    template: Renders | None = None,
    codec: Codec | None = None,
) -> AsyncIterator[Server]:
    """A server whose engine says a text; by default with the tokenizer of tiny-mixtral."""
    codec = codec or tiny_tokenizer()
    link = EngineLink(lambda data: engine.feed(data))
    engine = FakeEngine(link.feed, codec.encode(says, bare=True))
    engine.begin()
    ready = await link.ready
    model = Model(ready, codec, template or PlainTemplate(), chat_tokens=64, loaded=1)
    server = Front(model, link, Gate(most, 0), key)
    transport = httpx2.ASGITransport(app=server.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        client = AsyncOpenAI(
            api_key=key or "none", base_url="http://localhost/v1", http_client=http, max_retries=0
        )
        yield Server(server, engine, link, http, client)


async def chat(server: Server, **more: Any) -> Any:
    """A chat's answer."""
    return await server.openai.chat.completions.create(model="fake", messages=HELLO, **more)
