"""Closes a connection whose client still sends, such that the client can read its answer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import h11

from moesched.server.gathering import GatheringTransport

MOST_DROPPED = 128 << 20
"""Largest number of bytes of a request that are dropped after its answer."""


class LingeringTransport:
    """A transport that, if closed before a whole request has arrived, sends no more, and drops arriving bytes.

    Otherwise the system would reset the connection because of unread bytes, and the client could lose its answer.

    Args:
        transport: the transport that the connection writes to.
        conn: the connection's state as h11 keeps it.
        most_dropped: bytes that may come after `close`; more of them end the connection at once.

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
        """Send the bytes that wait, and close the connection, or within a request begin to drop arriving bytes."""
        if self.is_closing():
            return
        self.drops = self._is_within_request()
        if self.drops:
            self._transport.resume_reading()
            with suppress(OSError):  # the client has closed it, which is noticed when nothing comes
                self._transport.write_eof()
        else:
            self._transport.close()

    def drop(self, data: bytes) -> None:
        """Count bytes that arrived after `close`; too many of them end the connection."""
        self._left -= len(data)
        if self._left < 0:
            self._transport.abort()

    def _is_within_request(self) -> bool:
        """Test whether the client has its answer, but seems not to have sent its whole request."""
        answered = self._conn.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return answered and self._conn.their_state in (h11.SEND_BODY, h11.ERROR)
