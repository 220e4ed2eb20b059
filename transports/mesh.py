"""The mesh of a rank: its connections to all other ranks. The higher rank of each pair opens the connection.

A rank listens on one ROUTER for all higher ranks, and has one DEALER for each lower rank. A rank that connects greets
in its first frame, and the ROUTER sends only on connections on which a rank has greeted, so that a stranger learns
nothing. Each rank needs one address, and ranks may start in any order.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
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

HANDSHAKE_MILLISECONDS = 5_000
"""Milliseconds that a handshake may take."""
LINGER_MILLISECONDS = 5_000
"""Most milliseconds for sending the last frames when a transport is closed, since a peer may not read them."""

WAIT_SECONDS = 0.01
"""Seconds between the checks whether a rank is still connected that gets the last frame."""

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
        self.watch = Watch(self._context, known)
        self._greeting = pack(Frame(Kind.HERE, Kind.ABANDON, rank, epoch))
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
        # The highest rank listens to nobody, but is told of a port in use as all others are.
        self._use("listen at", self._listener.socket.bind, own)
        self._sources: dict[zmq.Socket[bytes], int | None] = {
            dealer: peer for peer, dealer in self._dealers.items()
        }
        """The sockets to receive from, each with its rank; None for the listener if several ranks send to it."""
        if callers:
            self._sources[self._listener.socket] = self._listener.only_caller
        self._only = next(iter(self._sources)) if len(self._sources) == 1 else None
        for each in self._sources:
            self._poller.register(each, zmq.POLLIN)
        for peer, dealer in self._dealers.items():
            self._use("connect to", dealer.connect, addresses[peer])
            send(dealer, self._greeting, NOW)
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
            return self._next(SLICE_MILLISECONDS)
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

    def close(self, farewell: Any = b"") -> None:
        """Send the last frames, and free all sockets.

        Args:
            farewell: bytes of the last frame to each rank that is connected; empty for none.
        """
        if farewell:
            self._leave(farewell)
        self._listener.socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self.watch.end()
        for each in (self._listener.socket, *self._dealers.values()):
            each.close()
        self._context.term()

    def refuse(self, message: Message, why: str) -> None:
        """Count and log a refused message; `why` is the reason."""
        self.watch.refuse("a frame", why, _metadata(message, "Peer-Address") or "this machine")

    def _leave(self, farewell: Any) -> None:
        """Send the last frame to all ranks, and wait until it is on its way to those that are still connected.

        A DEALER keeps frames for a connection that has ended, and would wait LINGER_MILLISECONDS for another one.
        """
        for peer in self._listener.callers:
            self.send(peer, farewell)
        until = time.monotonic() + LINGER_MILLISECONDS / 1000
        sent = {peer: self._send_tracked(peer, farewell) for peer in [*self.watch.connected]}
        for peer, tracker in sent.items():
            while not tracker.done and peer in self.watch.connected and time.monotonic() < until:
                with suppress(zmq.NotDone):
                    tracker.wait(WAIT_SECONDS)
            if tracker.done:
                self._dealers[peer].setsockopt(zmq.LINGER, LINGER_MILLISECONDS)

    def _send_tracked(self, peer: int, data: Any) -> zmq.MessageTracker:
        """Send a frame's bytes to a lower rank; the result tells when ZeroMQ has passed them to the system."""
        frame = zmq.Frame(data, track=True, copy=False, copy_threshold=0)
        with suppress(zmq.Again):
            self._dealers[peer].send(frame, NOW, copy=False)
        tracker: zmq.MessageTracker = frame.tracker
        return tracker

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
