"""The server's HTTP: which path does what, who may ask, and how errors look."""

from __future__ import annotations

import hmac
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesched.errors import MoeschedError
from moesched.server.answering import Chats, Completions
from moesched.server.errors import ApiError
from moesched.server.gate import Gate
from moesched.server.link import EngineLink
from moesched.server.metrics import Metrics
from moesched.server.model import Model
from moesched.server.options import is_loopback
from moesched.server.page import PAGE, PAGE_POLICY

OPEN_PATHS = frozenset(["/", "/health"])
"""Paths that need no key: the page asks for it, and says nothing by itself."""


class Front:
    """The application, and what it is made of.

    Args:
        key: what clients have to show; None if nothing.

    Attributes:
        app: the application of ASGI.
        gate: counts requests, and closes.
    """

    def __init__(self, model: Model, link: EngineLink, gate: Gate, key: str | None = None) -> None:
        self.gate = gate
        self._model = model
        self._link = link
        self._metrics = Metrics(lambda: link.state)
        routes = [
            Route("/v1/chat/completions", Chats(model, link, gate, self._metrics), methods=["POST"]),
            Route("/v1/completions", Completions(model, link, gate, self._metrics), methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/state", self.state),
            Route("/", self.page),
        ]
        faults = {ApiError: _api_error, HTTPException: _http_error, Exception: _own_error}
        plain = Starlette(routes=routes, exception_handlers=faults)  # type: ignore[arg-type]  # each takes its own kind
        known = frozenset(route.path for route in routes)
        guarded = OfThisMachine(plain) if key is None else Keyed(plain, key)
        self.app: ASGIApp = Counted(guarded, self._metrics, known)

    async def models(self, _: Request) -> Response:
        """/v1/models: the model that is served."""
        return _json({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        """/v1/models/NAME."""
        self._model.require(request.path_params["name"])
        return _json(self._described())

    async def health(self, _: Request) -> Response:
        """/health: 200 while requests are taken."""
        fine = not self.gate.closed and not self._link.ended.done()
        return _json({"status": "ok" if fine else "closing"}, 200 if fine else 503)

    async def metrics(self, _: Request) -> Response:
        """/metrics, for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def state(self, _: Request) -> Response:
        """/state: what the page shows."""
        ready, state = self._model.ready, self._link.state
        told = Shown(
            ready.model,
            ready.policy,
            ready.machine,
            time.monotonic(),
            state.running,
            state.waiting,
            state.held,
            state.room,
            state.steps,
            state.busy,
        )
        return _json(told)

    async def page(self, _: Request) -> Response:
        """/: a chat in the browser."""
        return Response(PAGE, headers={"Content-Security-Policy": PAGE_POLICY}, media_type="text/html")

    def _described(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.loaded,
            "owned_by": "moesched",
            "max_model_len": self._model.most_tokens,
        }


class Shown(NamedTuple):
    """The engine's state for the page; `at` is the server's clock in seconds."""

    model: str
    policy: str
    machine: str
    at: float
    running: int
    waiting: int
    held: int
    room: int
    steps: int
    busy: dict[str, float]


class Keyed:
    """Lets requests pass that show the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._shown = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if scope["path"] in OPEN_PATHS or hmac.compare_digest(given, self._shown):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await _error_response(error)(scope, receive, send)


class OfThisMachine:
    """Lets requests pass that name this machine, where no key is asked for.

    Otherwise a page of a stranger whose name was made to mean this machine could read answers in a browser here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        host = host_of(Headers(scope=scope).get("host", "localhost"))
        if is_loopback(host):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403, f"{host!r} is no name of this machine: ask 127.0.0.1, or let the server have a key"
        )
        await _error_response(error)(scope, receive, send)


class Counted:
    """Counts responses by path and status; `known` are the paths, so that strangers make no new ones."""

    def __init__(self, app: ASGIApp, metrics: Metrics, known: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note the status of its response."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._known else "other"
                self._metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, noting)


def host_of(header: str) -> str:
    """The name in a header `Host`, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or header
    except ValueError:
        return header


# ---------------------------------------------------------------- responses


def _json(content: object, status: int = 200) -> Response:
    fields = content._asdict() if isinstance(content, Shown) else content
    return Response(msgspec.json.encode(fields), status, media_type="application/json")


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, dict(error.headers), "application/json")


async def _api_error(_: Request, error: ApiError) -> Response:
    return _error_response(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    remedy = "there is /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics and a page at /"
    fault = f"{request.method} {request.url.path}: {error.detail}: {remedy}"
    return _error_response(ApiError(error.status_code, fault, headers=dict(error.headers or {})))


async def _own_error(_: Request, error: Exception) -> Response:
    """A fault of the server itself; its log has the traceback."""
    told = str(error) if isinstance(error, MoeschedError) else "the server has a fault; its log says more"
    return _error_response(ApiError(500, told, kind="server_error"))
