"""Errors in the form that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from moesched.errors import MoeschedError

MOST_MESSAGE = 1000
"""Largest number of characters of a message: some quote what the client sent."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ApiError(MoeschedError):
    """An error that is sent as the response to an HTTP request.

    Args:
        status: the status code of HTTP.
        kind: OpenAI's `type` of the error.
        param: the field of the request that is at fault.
        code: OpenAI's short name of the fault.
        headers: headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """Return the error as JSON."""
        told = _Told(" ".join(str(self).split())[:MOST_MESSAGE], self.kind, self.param, self.code)
        return msgspec.json.encode({"error": told})

    def response(self) -> Response:
        """Return the error as a response of HTTP."""
        return Response(self.body(), self.status, dict(self.headers), "application/json")


class _Told(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the error, with status 400, for a request that cannot be answered.

    Args:
        param: the field of the request that is at fault.
        code: OpenAI's short name of the fault.
    """
    return ApiError(400, message, param=param, code=code)


def server_error(message: str) -> ApiError:
    """Make the error for a fault of the server's own, with status 500."""
    return ApiError(500, message, kind="server_error")


def closing() -> ApiError:
    """Make the error, with status 503, for a request that comes while the server closes."""
    return ApiError(
        503, "the server closes: ask another one", kind="server_error", headers={"Retry-After": "10"}
    )


class EngineFailed(ApiError):
    """The engine has ended; nothing can be answered any more."""

    def __init__(self, why: str) -> None:
        super().__init__(500, f"the engine has ended: {why}", kind="server_error")


class ClientLeft(MoeschedError):
    """The client has closed its connection: nobody reads the answer."""
