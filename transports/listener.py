"""The socket on which a rank listens for the connections of higher ranks."""

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
"""Seconds after which a socket knows of all connections that ended before."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message from another rank, or from a stranger.

    Attributes:
        content: the message's bytes, as a frame of ZeroMQ.
        peer: the rank that must have sent the message, by its connection's key; None if several ranks may have sent it.
    """

    content: zmq.Frame
    peer: int | None


class Listener:
    """A ZeroMQ ROUTER that sends only on connections of ranks, so that a stranger learns nothing.

    Args:
        socket: the ROUTER.
        callers: the ranks that may connect; a connection is a rank's once the rank's greeting has come on it.
        read: function that decodes a message; returns None for a message that it refuses.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], callers: Sequence[int], read: Callable[[Message], Frame | None]
    ) -> None:
        self.socket = socket
        self.callers = callers
        self.only_caller = callers[0] if len(callers) == 1 else None
        self.unmet = {sender(Kind.HERE, each): each for each in callers}
        """The ranks that have not greeted yet, by the first bytes of their greeting."""
        self.names: dict[int, bytes] = {}
        """ZeroMQ's name of the connection to each rank that has greeted."""
        self._read = read
        self._asked: dict[int, float] = {}

    def send(self, rank: int, data: Any, copy: bool) -> None:
        """Send bytes to a rank that has greeted.

        Args:
            copy: True to copy the bytes first; False to keep `data` until they are sent.

        Raises:
            zmq.ZMQError: EAGAIN if the rank's queue is full, EHOSTUNREACH if its connection ended.
        """
        send(self.socket, self.names[rank], _MORE)
        send(self.socket, data, NOW, copy)

    def receive(self, flags: int) -> Message:
        """Receive the next message that is not the first greeting of a rank.

        Args:
            flags: as for `zmq.Socket.recv`.

        Raises:
            zmq.Again: no message came in time.
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
        """Return True if a frame should be sent to a rank, to find out whether its connection is the one that ended.

        Args:
            ended: the time at which a connection ended last, on the monotonic clock. ZeroMQ does not tell whose
                connection that was, but refuses to send on it.
        """
        due = rank in self.names and self._asked.get(rank, 0.0) < ended + SETTLED_SECONDS
        if due:
            self._asked[rank] = time.monotonic()
        return due

    def _meets(self, name: bytes, message: Message) -> bool:
        """Return True if a message is the first greeting of a rank; from then on the connection counts as the rank's.

        Args:
            name: ZeroMQ's name of the connection.
        """
        first = bytes(message.content.buffer[:SENDER_BYTES])
        if first not in self.unmet:
            return False
        if self._read(message) is not None:
            self.names[self.unmet.pop(first)] = name
        return True
