"""HTTP connections of uvicorn with time limits, OpenAI's form of errors, and a close that lets clients read answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moesched.server.errors import ApiError, bad_request, closing
from moesched.server.gathering import GatheringTransport

REQUEST_SECONDS = 20.0
"""Seconds within which a request has to arrive as a whole, headers and body."""
WRITE_SECONDS = 60.0
"""Seconds within which a client has to read the bytes that wait for it."""
MOST_AHEAD = 1 << 16
"""Largest number of bytes after a request that are read while it is answered."""
NOT_HTTP = bad_request("this is no HTTP/1.1, or its headers are longer than 64 KiB: send another request")
MOST_DROPPED = 128 << 20
"""Largest number of bytes of a request that are dropped after its answer."""


class TimedProtocol(H11Protocol):
    """A connection that is closed if its client sends or reads too slowly, or not at all."""

    request_seconds = REQUEST_SECONDS
    write_seconds = WRITE_SECONDS
    most_dropped = MOST_DROPPED

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._lingering: LingeringTransport
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request on a new connection."""
        gathering = GatheringTransport(transport)
        self._lingering = LingeringTransport(gathering, self.conn, self.most_dropped)
        super().connection_made(self._lingering)  # type: ignore[arg-type]  # it passes on what it has not itself
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Parse bytes that the client sent; count those of a request that has its answer already, and drop them."""
        if self._lingering.is_over_early():
            self._lingering.drop(data)
        if not self._lingering.drops:
            super().data_received(data)
            self._read_ahead()
        self._expect_request()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a request that was answered before all of it arrived."""
        super().on_response_complete()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        _cancel(self._request_timer)
        _cancel(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP: answer with status 400, without `msg`; if an answer has begun, just close."""
        self._refuse(NOT_HTTP)

    def shutdown(self) -> None:
        """Close the connection once its request is answered; a request whose body is still arriving is refused."""
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_state is h11.SEND_BODY:
            self._refuse(closing())
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no further request came in time."""
        super().timeout_keep_alive_handler()
        self._close()

    def pause_writing(self) -> None:
        """Start a timer that ends the connection if the client does not read within `write_seconds`."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer of `pause_writing`, since the client has read."""
        super().resume_writing()
        _cancel(self._write_timer)

    def _refuse(self, error: ApiError) -> None:
        """Answer a request with an error, unless an answer has begun; then close the connection.

        An application that waits for the request's body is told that the client has left.
        """
        if self.conn.our_state is h11.SEND_RESPONSE:  # the application waits for a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            told = {
                **error.headers,
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            headers = [(name.encode(), value.encode()) for name, value in told.items()]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self._close()

    def _close(self) -> None:
        """Close the connection once the client has read the bytes that wait, or after `write_seconds`."""
        self.transport.close()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def _read_ahead(self) -> None:
        """Go on reading while a request is answered, to notice if the client leaves.

        uvicorn pauses reading once bytes of a further request come; up to `MOST_AHEAD` of them are read all the same.
        """
        ahead, _ = self.conn.trailing_data
        if self.conn.their_state is h11.DONE and len(ahead) <= MOST_AHEAD:
            self.flow.resume_reading()

    def _expect_request(self) -> None:
        """Start the request timer while a first request, or the rest of a request, is still to arrive; else stop it.

        Between two requests of a connection, uvicorn's own timer limits the wait, so the request timer is stopped.
        """
        under_way = self._lingering.drops or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not under_way or self.timeout_keep_alive_task is not None:
            _cancel(self._request_timer)
            self._request_timer = None
        elif self._request_timer is None:
            self._request_timer = self.loop.call_later(self.request_seconds, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class LingeringTransport:
    """A transport that lets the client send the rest of its request if `close` comes before all of it has arrived.

    The transport then sends no more, and drops the bytes that arrive. If they stayed unread, the system would reset the
    connection, and the client could lose its answer.

    Args:
        transport: the transport that the connection writes to.
        conn: the connection's state as h11 keeps it.
        most_dropped: largest number of bytes that may come after answers to requests that have not arrived as a whole;
            more end the connection at once.

    Attributes:
        drops: whether arriving bytes are dropped; the connection then ends when the client closes it, or by `abort`.
    """

    def __init__(self, transport: GatheringTransport, conn: h11.Connection, most_dropped: int) -> None:
        self._transport = transport
        self._conn = conn
        self._left = most_dropped
        self.drops = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Test whether no more can be sent."""
        return self.drops or self._transport.is_closing()

    def close(self) -> None:
        """Send the bytes that wait, and close the connection.

        If the rest of a request is still to arrive, end only the sending side, and drop the bytes that arrive.
        """
        if self.is_closing():
            return
        self.drops = self.is_over_early()
        if self.drops:
            self._transport.resume_reading()
            with suppress(OSError):  # the client has closed it, which is noticed when nothing comes
                self._transport.write_eof()
        else:
            self._transport.close()

    def drop(self, data: bytes) -> None:
        """Count bytes that arrived after the answer; too many of them end the connection."""
        self._left -= len(data)
        if self._left < 0:
            self._transport.abort()

    def is_over_early(self) -> bool:
        """Test whether the client has its answer, but seems not to have sent its whole request."""
        answered = self._conn.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return answered and self._conn.their_state in (h11.SEND_BODY, h11.ERROR)
