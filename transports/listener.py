"""The socket that a rank listens on, and the higher ranks that have connected to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.backend import Socket as BareSocket

from .frames import SENDER_BYTES, Frame, Kind, sender

NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
send, receive = (
    BareSocket.send,
    BareSocket.recv,
)  # `zmq.Socket` looks for options of other sockets first, in Python

SETTLED_SECONDS = 1.0
"""Time after which a socket knows of all connections that ended before."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message from another rank, or from a stranger.

    Attributes:
        content: its bytes.
        peer: the rank whose key its connection has; None where several may have it, and ZeroMQ knows.
    """

    content: zmq.Frame
    peer: int | None


class Listener:
    """A ROUTER that sends only on connections on which a rank has greeted, so that a stranger learns nothing.

    Args:
        socket: the ROUTER.
        callers: the ranks that may connect.
        read: decodes a message, or refuses it.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], callers: Sequence[int], read: Callable[[Message], Frame | None]
    ) -> None:
        self.socket = socket
        self.callers = callers
        self.only_caller = callers[0] if len(callers) == 1 else None
        self.unmet = {sender(Kind.HERE, each): each for each in callers}
        """Ranks that have not greeted yet, by the first bytes of their greeting."""
        self.names: dict[int, bytes] = {}
        """ZeroMQ's name of the connection to each rank that has."""
        self._read = read
        self._asked: dict[int, float] = {}

    def send(self, rank: int, data: Any, copy: bool) -> None:
        """Send bytes to a rank that has greeted.

        Raises:
            zmq.ZMQError: EAGAIN if its queue is full, EHOSTUNREACH if its connection ended.
        """
        send(self.socket, self.names[rank], _MORE)
        send(self.socket, data, NOW, copy)

    def receive(self, flags: int) -> Message:
        """The next message that is not the first greeting of a rank.

        Raises:
            zmq.Again: none came in time.
        """
        while True:
            name = receive(self.socket, flags)
            content = receive(self.socket, flags, False)
            if content.more:  # a stranger's: no rank sends several parts
                while receive(self.socket, flags, False).more:
                    pass
            message = Message(content, self.only_caller)
            if not (self.unmet and self._meets(name, message)):
                return message

    def should_ask(self, rank: int, ended: float) -> bool:
        """Test whether a connection ended of late, which may be that of a rank; a frame to it will tell.

        Args:
            ended: the time at which a connection ended last, on the monotonic clock.
        """
        due = rank in self.names and self._asked.get(rank, 0.0) < ended + SETTLED_SECONDS
        if due:
            self._asked[rank] = time.monotonic()
        return due

    def _meets(self, name: bytes, message: Message) -> bool:
        """Test whether a message is the first greeting of a rank; its connection is that rank's from then on."""
        first = bytes(message.content.buffer[:SENDER_BYTES])
        if first not in self.unmet:
            return False
        if self._read(message) is not None:
            self.names[self.unmet.pop(first)] = name
        return True
