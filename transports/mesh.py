"""The mesh of a rank: its connections to all other ranks. The higher rank of each pair opens the connection.

A rank listens on one ROUTER for all higher ranks, and has one DEALER for each lower rank. A rank that connects greets
in its first frame, and the ROUTER sends only on connections on which a rank has greeted, so that a stranger learns
nothing. Each rank needs one address, and ranks may start in any order.

The watch, a thread, greets as soon as a connection is there. Until then it alone uses the DEALER, and never afterwards:
ZeroMQ allows one thread at a time to use a socket.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from moesched.errors import BadInput

from .curve import Keys, check_keys, seal
from .frames import JOINED_UP_TO, BadFrame, Frame, Kind, pack, unpack
from .listener import NOW, Listener, Message, receive, send
from .watch import Watch

WAITING_FRAMES = 64
"""Largest number of frames in a queue; the sender waits while it is full."""

SLICE_MILLISECONDS = 50
"""Milliseconds between a waiting rank's checks for lost ranks and a closed transport."""

GREETING_MILLISECONDS = 1
"""Milliseconds between a waiting rank's checks for lower ranks that were greeted meanwhile."""

HANDSHAKE_MILLISECONDS = 5_000
"""Milliseconds that a handshake may take."""
LINGER_MILLISECONDS = 5_000
"""Most milliseconds for sending the last frames when a transport is closed, since a peer may not read them."""

_starting = threading.Lock()

_LOCAL = re.compile(r"(ipc://|tcp://(127\.[0-9.]+|localhost|\[::1\]):)")


class Mesh:
    """The connections of one rank to all others.

    Args:
        addresses: one address for each rank: `tcp://HOST:PORT` or `ipc://PATH`.
        rank: number of this rank.
        epoch: number of the period in which these ranks run together; frames of other epochs are refused.
        keys: the CURVE keys; None is allowed only if all addresses are on this machine.
        listen: the address to bind, such as `tcp://*:PORT` where HOST is a name; None for the rank's own address.
        lost_after_seconds: silence after which a machine counts as lost. The end of a process is noticed at once, since
            its connection ends.
        max_bytes: size of the largest frame that is accepted.

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
        _start_collector()
        self.max_bytes = max_bytes
        self._keys = keys
        self._epoch = epoch
        self._rank = rank
        self._context: zmq.Context[Any] = zmq.Context()
        callers = range(rank + 1, len(addresses))
        known = None if keys is None else {keys.public[each]: each for each in callers}
        self._greeting = pack(Frame(Kind.HERE, Kind.ABANDON, rank, epoch))
        self.watch = Watch(self._context, known, self._greet)
        self._gone: set[int] = set()
        """The higher ranks whose connection ended."""
        self._kept: deque[Message] = deque()
        """The messages that were received while a rank's greeting was looked for."""
        self._ready: deque[zmq.Socket[bytes]] = deque()
        self._poller = zmq.Poller()
        own = listen or addresses[rank]
        self._listener = Listener(self._socket(own, None, lost_after_seconds), callers, self.read)
        self._dealers = {
            peer: self._socket(addresses[peer], peer, lost_after_seconds) for peer in range(rank)
        }
        self._ungreeted = {*self._dealers}
        """The lower ranks that were not greeted when the watch was last asked; nothing is received from them."""
        # The highest rank listens to nobody, but is told of a port in use as all others are.
        self._use("listen at", self._listener.socket.bind, own)
        if callers:
            self._poller.register(self._listener.socket, zmq.POLLIN)
        self._only = None if self._dealers else self._listener.socket
        """The only socket to receive from; None if there are several, or if its rank was not greeted yet."""
        for peer, dealer in self._dealers.items():
            self._use("connect to", dealer.connect, addresses[peer])
        self.watch.begin()

    def send(self, peer: int, data: Any) -> bool:
        """Send a frame's bytes to a rank; returns False if the rank is not connected, or its queue is full."""
        copy = len(data) <= JOINED_UP_TO
        try:
            if peer in self.watch.connected:
                send(self._dealers[peer], data, NOW, copy)
            elif peer in self._listener.names or self._met(peer):
                self._listener.send(peer, data, copy)
            else:
                return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._gone.add(peer)
            elif error.errno != zmq.EAGAIN:
                raise
            return False
        return True

    def receive(self) -> Message | None:
        """Receive the next message; returns None if no message comes within SLICE_MILLISECONDS."""
        if self._kept:
            return self._kept.popleft()
        if self._only is None:
            self._take_greeted()
            return self._next(GREETING_MILLISECONDS if self._ungreeted else SLICE_MILLISECONDS)
        try:
            return self._from(self._only, 0)
        except zmq.Again:
            return None

    def read(self, message: Message) -> Frame | None:
        """Decode the frame in a message; returns None if the frame is refused. Refusals are counted and logged."""
        try:
            frame = unpack(message.content.buffer)
            if frame.rank not in self._dealers and frame.rank not in self._listener.callers:
                raise BadFrame(f"from rank {frame.rank}, which is not one of the others")
            if frame.epoch != self._epoch:
                raise BadFrame(f"of epoch {frame.epoch}; this is epoch {self._epoch}")
            if not self.is_from(message, frame.rank):
                raise BadFrame(f"from rank {frame.rank}, with the key of rank {_key_of(message)}")
        except BadFrame as error:
            self.refuse(message, str(error))
            return None
        return frame

    def is_from(self, message: Message, rank: int) -> bool:
        """Return True if a message was sent with the key of the rank `rank`; always True if the mesh has no keys."""
        if self._keys is None or message.peer == rank:
            return True
        return message.peer is None and _metadata(message, "User-Id") == str(rank)

    def poll(self, milliseconds: int) -> bool:
        """Wait up to `milliseconds` for a message; returns True if there is one."""
        self._take_greeted()
        return bool(self._kept or self._poller.poll(milliseconds))

    def lost(self, rank: int) -> bool:
        """Return True if the connection to a rank has ended; all that the rank sent before can be received then."""
        if rank in self._dealers:
            return rank in self.watch.lost
        if self._listener.should_ask(rank, self.watch.ended):
            self.send(rank, self._greeting)
        return rank in self._gone

    def trouble(self, rank: int) -> str:
        """Return the likely reason why a rank is not connected; empty if no reason is known."""
        return (
            self.watch.refusal if rank in self._listener.unmet.values() else self.watch.trouble.get(rank, "")
        )

    def close(self) -> None:
        """Send the last frames, and free all sockets."""
        for peer, dealer in self._dealers.items():
            if peer in self.watch.connected:
                dealer.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._listener.socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self.watch.end()
        for each in (self._listener.socket, *self._dealers.values()):
            each.close()
        self._context.term()

    def refuse(self, message: Message, why: str) -> None:
        """Count and log a refused message; `why` is the reason."""
        self.watch.refuse("a frame", why, _metadata(message, "Peer-Address") or "this machine")

    def _greet(self, peer: int) -> bool:
        """Greet a lower rank, on the watch's thread; returns False if its connection is not ready or has ended."""
        try:
            send(self._dealers[peer], self._greeting, NOW)
        except zmq.Again:
            return False
        return True

    def _take_greeted(self) -> None:
        """Receive from the lower ranks that were greeted meanwhile, too."""
        if not self._ungreeted:
            return
        for peer in self._ungreeted & self.watch.greeted:
            self._ungreeted.remove(peer)
            self._poller.register(self._dealers[peer], zmq.POLLIN)
        if len(self._dealers) == 1 and not (self._ungreeted or self._listener.callers):
            (self._only,) = self._dealers.values()

    def _next(self, milliseconds: int) -> Message | None:
        """Receive the next message of any socket; returns None if no message comes in time."""
        if not self._ready:
            self._ready.extend(each for each, _ in self._poller.poll(milliseconds))
        if not self._ready:
            return None
        try:
            return self._from(self._ready.popleft(), NOW)
        except zmq.Again:
            return None

    def _from(self, source: zmq.Socket[bytes], flags: int) -> Message:
        """Receive the next message of a socket. Raises `zmq.Again` if no message comes in time.

        Args:
            flags: as for `zmq.Socket.recv`.
        """
        if source is self._listener.socket:
            return self._listener.receive(flags)
        return Message(
            receive(source, flags, False), next(r for r, each in self._dealers.items() if each is source)
        )

    def _met(self, peer: int) -> bool:
        """Return True if a higher rank has greeted, after reading the messages that have arrived by now."""
        while peer in self._listener.unmet.values() and len(self._kept) < WAITING_FRAMES:
            message = self._next(0)
            if message is None:
                break
            self._kept.append(message)
        return peer in self._listener.names

    def _socket(self, address: str, peer: int | None, lost_after_seconds: float) -> zmq.Socket[bytes]:
        heartbeat = max(1, round(1000 * lost_after_seconds))
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER if peer is None else zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, WAITING_FRAMES),
            (zmq.RCVHWM, WAITING_FRAMES),
            (zmq.RCVTIMEO, SLICE_MILLISECONDS),
            (zmq.LINGER, 0),
            (zmq.IPV6, int(is_ipv6(address))),
            (zmq.MAXMSGSIZE, self.max_bytes),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS),
            (zmq.HEARTBEAT_IVL, max(1, heartbeat // 5)),
            (zmq.HEARTBEAT_TIMEOUT, heartbeat),
            (zmq.HEARTBEAT_TTL, heartbeat),
            (zmq.CONNECT_TIMEOUT, 2_000),
            (zmq.RECONNECT_IVL, 20),
            (zmq.RECONNECT_IVL_MAX, 500),
        ):
            socket.setsockopt(option, value)
        if peer is None:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        else:
            socket.setsockopt(
                zmq.IMMEDIATE, 1
            )  # drops frames for a connection that ended: closing waits for others
        if self._keys is not None:
            seal(socket, self._keys, self._rank, peer)
        self.watch.over(socket, peer)
        return socket

    def _use(self, purpose: str, call: Callable[[str], object], address: str) -> None:
        """Call a function of a socket, such as bind or connect, with an address.

        Args:
            purpose: the purpose of the call in words, for the message.

        Raises:
            BadInput: the system refuses the address; all sockets are then freed.
        """
        try:
            call(address)
        except zmq.ZMQError as error:
            self.watch.begin()
            self.close()
            raise BadInput(
                f"rank {self._rank} cannot {purpose} {address}: {zmq.strerror(error.errno or 0)}"
            ) from None


def is_ipv6(address: str) -> bool:
    """Test whether an address is a literal IPv6 address, such as `tcp://[::1]:7001`.

    Names are resolved to IPv4, since a Mac's name, such as `mac-0.local`, resolves first to a link-local IPv6 address,
    which cannot be reached without the name of the network interface.
    """
    host, _, _ = address.removeprefix("tcp://").rpartition(":")
    return address.startswith("tcp://") and ":" in host


def check_addresses(addresses: Sequence[str], rank: int, keys: Keys | None) -> None:
    """Check that a rank with these keys can make a mesh of these addresses.

    Raises:
        BadInput: the mesh cannot be made; the message gives the reason.
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


def _start_collector() -> None:
    """Start pyzmq's thread that frees frames which were sent without a copy.

    Without this call, the first such frame of a process starts the thread, but without a lock. Two threads that send at
    once would then each make a socket to pyzmq's thread, and one of the two would be closed while it is in use.
    """
    with _starting:
        zmq.Frame(b" ", copy=False)


def _key_of(message: Message) -> str:
    """Return, as a text, the number of the rank with whose key a message was sent."""
    return _metadata(message, "User-Id") if message.peer is None else str(message.peer)


def _metadata(message: Message, name: str) -> str:
    try:
        value = message.content.get(name)
    except zmq.ZMQError:
        return ""
    return value if isinstance(value, str) else ""
