"""Sockets between all pairs of ranks: each rank receives on one socket, and sends to each other rank on a separate one.

All are DEALERs. The receiving socket never sends, so that an unknown peer learns nothing from it. The sending sockets
send only to a peer with the key of their rank. One address for each rank is enough, and ranks may start in any order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import zmq

from moesched.errors import BadInput

from .curve import Keys, check_keys, seal
from .frames import JOINED_UP_TO, BadFrame, Frame, unpack
from .watch import Watch

WAITING_FRAMES = 64
"""Length of each queue; the sender waits while it is full."""

SLICE_MILLISECONDS = 50
"""Interval at which a waiting rank checks for lost ranks and a closed transport."""

HANDSHAKE_MILLISECONDS = 5_000
LINGER_MILLISECONDS = 5_000
"""Time allowed for sending the last frames when a transport is closed, since a peer may not read them."""

_LOCAL = re.compile(r"(ipc://|tcp://(127\.[0-9.]+|localhost|\[::1\]):)")


class Mesh:
    """The connections of one rank to all others.

    Args:
        addresses: one for each rank: `tcp://HOST:PORT` or `ipc://PATH`.
        rank: this one's.
        epoch: the number of the ranks' start; frames of others are refused.
        keys: None is allowed only where all addresses are on this machine.
        listen: the address to bind, if not the rank's own, such as `tcp://*:PORT` where HOST is a name.
        lost_after_seconds: silence after which a machine counts as lost. The end of a process is noticed at once,
            since its connection ends.
        max_bytes: the largest frame that is accepted.

    Raises:
        BadInput: the rank does not exist, an address cannot be used, or keys are missing or do not fit.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        *,
        keys: Keys | None,
        epoch: int,
        listen: str | None,
        lost_after_seconds: float,
        max_bytes: int,
    ) -> None:
        check_addresses(addresses, rank, keys)
        self.max_bytes = max_bytes
        self._keys = keys
        self._several_keys = keys is not None and len(addresses) > 2
        """Whether frames must be told apart by their keys: with one other rank, only its key is admitted."""
        self._epoch = epoch
        self._rank = rank
        self._heartbeat = max(1, round(1000 * lost_after_seconds))
        self._context: zmq.Context[Any] = zmq.Context()
        public = None if keys is None else {key: each for each, key in enumerate(keys.public) if each != rank}
        self.watch = Watch(self._context, public)
        self._ear = self._socket(None)
        self._mouths: dict[int, zmq.Socket[bytes]] = {}
        self._heard: set[int] = set()
        self._bind(listen or addresses[rank])
        for peer, address in enumerate(addresses):
            if peer != rank:
                self._mouths[peer] = self._socket(peer)
                self._mouths[peer].connect(address)
        self.watch.begin()

    def send(self, peer: int, data: Any) -> bool:
        """Send a frame's bytes; False where the peer is not connected yet, or its queue is full."""
        try:
            self._mouths[peer].send(data, zmq.NOBLOCK, copy=len(data) <= JOINED_UP_TO)
        except zmq.Again:
            return False
        return True

    def receive(self) -> zmq.Frame | None:
        """The next message; None after a short time-out."""
        try:
            return self._ear.recv(copy=False)
        except zmq.Again:
            return None

    def read(self, message: zmq.Frame) -> Frame | None:
        """The frame in a message; None where it is refused."""
        try:
            frame = unpack(message.buffer)
            if frame.rank not in self._mouths:
                raise BadFrame(f"from rank {frame.rank}, which is not one of the others")
            if frame.epoch != self._epoch:
                raise BadFrame(f"of epoch {frame.epoch}; this is epoch {self._epoch}")
            if not self.is_from(message, frame.rank):
                raise BadFrame(
                    f"from rank {frame.rank}, with the key of rank {_metadata(message, 'User-Id')}"
                )
        except BadFrame as error:
            self.refuse(message, str(error))
            return None
        return frame

    def is_from(self, message: zmq.Frame, rank: int) -> bool:
        """Whether a message was sent with the key of a rank."""
        genuine = not self._several_keys or message.get("User-Id") == str(rank)
        if genuine and rank not in self._heard:
            self._heard.add(rank)
            self.watch.heard(message.get(zmq.SRCFD), rank)
        return genuine

    def poll(self, milliseconds: int) -> bool:
        """Whether a message arrives within some time."""
        return bool(self._ear.poll(milliseconds))

    def close(self) -> None:
        """Send the last frames, and free all sockets."""
        for socket in (self._ear, *self._mouths.values()):
            socket.setsockopt(zmq.LINGER, 0 if socket is self._ear else LINGER_MILLISECONDS)
        self.watch.end()
        for socket in (self._ear, *self._mouths.values()):
            socket.close()
        self._context.term()

    def refuse(self, message: zmq.Frame, why: str) -> None:
        """Count and log a refused message."""
        self.watch.refuse("a frame", why, _metadata(message, "Peer-Address") or "this machine")

    def _socket(self, peer: int | None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, WAITING_FRAMES),
            (zmq.RCVHWM, WAITING_FRAMES),
            (zmq.RCVTIMEO, SLICE_MILLISECONDS),
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.IPV6, 1),
            (zmq.MAXMSGSIZE, self.max_bytes),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS),
            (zmq.HEARTBEAT_IVL, max(1, self._heartbeat // 5)),
            (zmq.HEARTBEAT_TIMEOUT, self._heartbeat),
            (zmq.HEARTBEAT_TTL, self._heartbeat),
            (zmq.CONNECT_TIMEOUT, 2_000),
            (zmq.RECONNECT_IVL, 20),
            (zmq.RECONNECT_IVL_MAX, 500),
        ):
            socket.setsockopt(option, value)
        if self._keys is not None:
            seal(socket, self._keys, self._rank, peer)
        self.watch.over(socket, peer)
        return socket

    def _bind(self, address: str) -> None:
        try:
            self._ear.bind(address)
        except zmq.ZMQError as error:
            self.watch.begin()
            self.close()
            raise BadInput(
                f"rank {self._rank} cannot listen at {address}: {zmq.strerror(error.errno or 0)}"
            ) from None


def check_addresses(addresses: Sequence[str], rank: int, keys: Keys | None) -> None:
    """Check that a mesh can be made of these addresses.

    Raises:
        BadInput: it cannot; the message gives the reason.
    """
    if not 0 <= rank < len(addresses):
        raise BadInput(f"rank {rank} of {len(addresses)} addresses; ranks count from 0")
    for each, address in enumerate(addresses):
        if not re.fullmatch(r"tcp://.+:[0-9]+|ipc://.+", address):
            raise BadInput(f"the address of rank {each} is {address!r}; write tcp://HOST:PORT or ipc://PATH")
        if addresses.index(address) != each:
            raise BadInput(f"ranks {addresses.index(address)} and {each} have the same address {address}")
        if keys is None and not _LOCAL.match(address):
            raise BadInput(
                f"rank {each} at {address} may be on another machine: give keys (`moesched keygen`), "
                "without which only loopback and ipc addresses are used"
            )
    if keys is not None:
        check_keys(keys, rank, len(addresses))


def _metadata(message: zmq.Frame, name: str) -> str:
    try:
        value = message.get(name)
    except zmq.ZMQError:
        return ""
    return value if isinstance(value, str) else ""
