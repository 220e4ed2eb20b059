"""The bodies of requests, up to a size."""

from __future__ import annotations

from starlette.requests import Request

from moesched.server.errors import ApiError, ClientLeft

MOST_BYTES = 4 << 20
"""The most bytes of a body: a prompt of half a million token ids."""


async def read_bytes(request: Request, most: int = MOST_BYTES) -> bytes:
    """Read the body of a request; one that is too long is refused before it has come.

    Raises:
        ApiError: it is no JSON by its header, or too long.
        ClientLeft: the client has closed the connection.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the body is {kind or 'of no type'}: send JSON, with Content-Type: application/json"
        )
    announced = request.headers.get("content-length", "0")
    if int(announced) > most:  # h11 has checked that it is a number
        raise _too_long(most)
    pieces, left = [], most
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece: bytes = message.get("body", b"")
        left -= len(piece)
        if left < 0:
            raise _too_long(most)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most:,} bytes: shorten it")
