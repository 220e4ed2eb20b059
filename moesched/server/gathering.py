"""Gathers the bytes that a connection writes, and sends them by one call in the event loop's next turn."""

from __future__ import annotations

import asyncio
from typing import Any


class GatheringTransport:
    """A transport that keeps what is written until the event loop's next turn, and sends it in one call.

    A step of the engine gives each stream a token. A call that sends may wake the client's process, and waking it takes
    longer than making the next stream's text. So all streams send in the next turn, one directly after the other: the
    process is then woken only once.

    Args:
        transport: the transport that asyncio made.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._kept: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep bytes, to send them in the loop's next turn."""
        if not self._kept:
            self._loop.call_soon(self._send)
        self._kept.append(data)

    def write_eof(self) -> None:
        """Send what was kept, and end the connection's sending side."""
        self._send()
        self._transport.write_eof()

    def close(self) -> None:
        """Send what was kept, and close the connection."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._kept and not self._transport.is_closing():
            self._transport.write(b"".join(self._kept))
        self._kept.clear()
