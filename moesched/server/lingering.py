"""The end of a connection whose client still sends: the client reads its last answer first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MOST_DROPPED = 128 << 20
"""The most bytes that are dropped of a request that has its answer."""


class LingeringTransport:
    """A transport that is closed within a request in two steps: no more is sent, and what comes is dropped.

    The system resets a connection that is closed with unread bytes, and the client may lose the answer before them.

    Args:
        transport: the one that asyncio made.
        is_within_request: tests whether the client has an answer, and may still send what it is the answer to.
        most_dropped: bytes that may come after `close`; more of them end the connection at once.

    Attributes:
        drops: True from the first step on; the second one is the client's, or that of whoever calls `abort`.
    """

    def __init__(
        self, transport: asyncio.Transport, is_within_request: Callable[[], bool], most_dropped: int
    ) -> None:
        self._transport = transport
        self._is_within_request = is_within_request
        self._left = most_dropped
        self.drops = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Test whether no more can be sent."""
        return self.drops or self._transport.is_closing()

    def close(self) -> None:
        """Send what waits, and close the connection, or begin to drop what comes."""
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
        """Count what came too late; too much of it closes the connection."""
        self._left -= len(data)
        if self._left < 0:
            self._transport.abort()
