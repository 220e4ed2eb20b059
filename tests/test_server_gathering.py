"""Streams of a server are sent together, in one turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import cast

from moesched.server.gathering import GatheringTransport


class Sent(list[tuple[str, bytes]]):
    """Names of connections with the bytes that they sent, in order."""


class RecordingTransport:
    """A connection of the system that notes what is sent through it."""

    def __init__(self, name: str, sent: Sent) -> None:
        self._name = name
        self._sent = sent
        self._closing = False

    def write(self, data: bytes) -> None:
        assert not self._closing
        self._sent.append((self._name, data))

    def write_eof(self) -> None:
        self._sent.append((self._name, b"<end>"))

    def close(self) -> None:
        self._closing = True
        self._sent.append((self._name, b"<closed>"))

    def abort(self) -> None:
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing


def gathering(name: str, sent: Sent) -> GatheringTransport:
    """A connection with a name, that notes what it sends."""
    return GatheringTransport(cast("asyncio.Transport", RecordingTransport(name, sent)))


async def test_connections_send_after_all_of_them_wrote() -> None:
    sent = Sent()
    first, second = gathering("first", sent), gathering("second", sent)
    first.write(b"a")
    second.write(b"b")
    first.write(b"c")
    assert not sent
    await asyncio.sleep(0)
    assert sent == [("first", b"ac"), ("second", b"b")]


async def test_what_was_written_is_sent_before_a_connection_ends() -> None:
    sent = Sent()
    closed, ended = gathering("closed", sent), gathering("ended", sent)
    closed.write(b"a")
    closed.close()
    ended.write(b"b")
    ended.write_eof()
    await asyncio.sleep(0)
    assert sent == [("closed", b"a"), ("closed", b"<closed>"), ("ended", b"b"), ("ended", b"<end>")]


async def test_nothing_is_sent_on_a_connection_that_was_lost() -> None:
    sent = Sent()
    lost = gathering("lost", sent)
    lost.write(b"a")
    lost.abort()
    await asyncio.sleep(0)
    assert not sent
