"""The server's HTTP application: its paths, and responses to errors."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from moesched.errors import MoeschedError
from moesched.server.answering import Chats, Completions
from moesched.server.errors import ApiError
from moesched.server.gate import Gate
from moesched.server.guards import CountedResponses, Keyed, OfOneLength, OfThisMachine, WithAbsoluteTargets
from moesched.server.link import EngineLink
from moesched.server.metrics import Metrics
from moesched.server.model import Model
from moesched.system.plain_text import shown

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's content security policy: it loads nothing, and asks only the server that it came from."""
PAGE = (Path(__file__).parent / "page.html").read_bytes()
"""HTML of a page with a chat, and with the engine's lanes as they are now."""
MOST_METHOD = 20
"""Largest number of characters of a method that an error repeats."""


class Front:
    """The application that answers HTTP requests about one model.

    Args:
        model: the model that is served.
        link: the pipe to the engine's process.
        key: the API key that clients have to send; None for none.

    Attributes:
        app: the ASGI application.
        gate: counts answers, and refuses requests once it is closed.
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
        # A redirection would send clients to whatever `Host` they were made to name.
        plain.router.redirect_slashes = False
        known = frozenset(route.path for route in routes)
        guarded = OfThisMachine(plain) if key is None else Keyed(plain, key)
        counted = CountedResponses(OfOneLength(guarded), self._metrics, known)
        self.app: ASGIApp = WithAbsoluteTargets(counted)

    async def models(self, _: Request) -> Response:
        """Answer /v1/models with a list of the one model that is served."""
        return _json({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        """Answer /v1/models/NAME with the model that is served, if this is its name."""
        self._model.require(request.path_params["name"])
        return _json(self._described())

    async def health(self, _: Request) -> Response:
        """Answer /health with status 200 while requests are taken, then with 503."""
        fine = not self.gate.closed and not self._link.ended.done()
        return _json({"status": "ok" if fine else "closing"}, 200 if fine else 503)

    async def metrics(self, _: Request) -> Response:
        """Answer /metrics with the server's metrics, for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def state(self, _: Request) -> Response:
        """Answer /state with the names of model, policy and machine, and the fields of the engine's `State`.

        The field `at` is the time on the server's monotonic clock, in seconds.
        """
        ready = self._model.ready
        served = {"model": ready.model, "policy": ready.policy, "machine": ready.machine}
        return _json(served | {"at": time.monotonic()} | msgspec.structs.asdict(self._link.state))

    async def page(self, _: Request) -> Response:
        """Answer / with a page that is a chat in the browser."""
        return Response(PAGE, headers={"Content-Security-Policy": PAGE_POLICY}, media_type="text/html")

    def _described(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.loaded,
            "owned_by": "moesched",
            "max_model_len": self._model.most_tokens,
        }


# ---------------------------------------------------------------- responses


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _api_error(_: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    paths = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
    remedy = f"use {headers['Allow']}" if "Allow" in headers else f"there is {paths}"
    fault = f"{request.method[:MOST_METHOD]} of {shown(request.scope['path'])}: {error.detail}: {remedy}"
    return ApiError(error.status_code, fault, headers=headers).response()


async def _own_error(_: Request, error: Exception) -> Response:
    """Return the response to a fault of the server itself; the traceback is in the server's log."""
    told = str(error) if isinstance(error, MoeschedError) else "the server has a fault; its log says more"
    return ApiError(500, told, kind="server_error").response()
