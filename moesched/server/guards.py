"""ASGI applications that check, count or rewrite requests, and pass them on to the application that answers."""

from __future__ import annotations

import hmac
import re
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesched.server.errors import ApiError
from moesched.server.metrics import Metrics
from moesched.server.options import is_loopback
from moesched.system.plain_text import shown

OPEN_PATHS = frozenset(["/", "/health"])
"""Paths that need no key: the page, which asks the user for the key, and the server's health."""


class Keyed:
    """Passes on requests that have the API key or are for one of the `OPEN_PATHS`, and refuses others."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request on to the application, or refuse it."""
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        knows = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        if knows or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)


class OfThisMachine:
    """Passes on requests whose `Host` names this machine, and refuses others; used where no key is required.

    A foreign web page cannot read answers then, even if its name was made to point to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request on to the application, or refuse it."""
        host = host_of(Headers(scope=scope).get("host", "localhost"))
        if is_loopback(host):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403, f"{shown(host)} is no name of this machine: ask 127.0.0.1, or let the server have a key"
        )
        await error.response()(scope, receive, send)


class CountedResponses:
    """Counts responses by path and status.

    Args:
        known: the paths that are counted by name; all others count as "other".
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, known: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request on to the application, and note the status of its response."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._known else "other"
                self._metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, noting)


class OfOneLength:
    """Passes on requests; refuses those with both `Content-Length` and `Transfer-Encoding`, and ends their connection.

    A proxy may go by one header and this server by the other; part of the body would then count as a further request
    (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request on to the application, or refuse it."""
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            error = ApiError(
                400,
                "the body has two lengths: send either Content-Length or Transfer-Encoding",
                headers={"Connection": "close"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


_ABSOLUTE = re.compile(rb"https?://([^/]+)(.*)", re.IGNORECASE)


class WithAbsoluteTargets:
    """Passes on requests. If a request's target is a whole URL, as proxies send, its host replaces the header `Host`.

    RFC 9112, section 3.2.2, asks this of every server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request on to the application, with the path of its target alone."""
        if url := _ABSOLUTE.fullmatch(scope.get("raw_path", b"")):
            host, path = url[1], url[2] or b"/"
            headers = [(b"host", host), *(each for each in scope["headers"] if each[0] != b"host")]
            scope = {**scope, "path": unquote(path.decode()), "raw_path": path, "headers": headers}
        await self._app(scope, receive, send)


def host_of(header: str) -> str:
    """Return the name in a header `Host`, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or header
    except ValueError:
        return header
