"""The launcher's end of the control channel: one socket that all nodes connect to, encrypted and authenticated.

The launcher is the process that starts the nodes and tells them what to run.
"""

from __future__ import annotations

import errno
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from moesched.cluster.curve.keys import KeyPair
from moesched.cluster.curve.zap import LOGGED, KeyCheck
from moesched.cluster.endpoints import endpoint, is_ipv6, listening_at, not_here, place
from moesched.cluster.messages import (
    LONGEST,
    MOST_BYTES,
    LauncherSays,
    NodeSays,
    Serials,
    Unreadable,
    pack,
    read_node,
)
from moesched.errors import BadInput
from moesched.system.logs import Log

_log = Log(__name__)

Peer = bytes
"""ZeroMQ's identity of a connection to a node."""


class Heard(NamedTuple):
    """A message that the launcher received from a node.

    Attributes:
        peer: ZeroMQ's identity of the connection.
        key: the sender's public key.
        address: the sender's IP address.
        message: the message.
    """

    peer: Peer
    key: str
    address: str
    message: NodeSays


class Control:
    """The launcher's socket: receives messages of nodes, and sends messages to them.

    Args:
        known: names of the nodes by public key; peers with other keys are refused and logged.

    Attributes:
        refused: addresses of the peers refused so far, the earliest first; only the first `LOGGED` are kept.

    Raises:
        BadInput: the address is not this machine's, or the port is in use.
    """

    def __init__(self, address: str, port: int, keys: KeyPair, known: Mapping[str, str]) -> None:
        self._context = zmq.Context()
        self._check = KeyCheck(self._context, {key: key for key in known})
        self.refused: list[str] = []
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 2_000
        self._socket.sndhwm = 0  # with a limit, messages beyond it would be dropped
        self._socket.maxmsgsize = MOST_BYTES
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.secret.encode()
        self._socket.curve_publickey = keys.public.encode()
        self._socket.zap_domain = b"moesched"
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._peers: dict[int, Peer] = {}
        self._said: defaultdict[Peer, Serials] = defaultdict(Serials)
        self._heard: defaultdict[Peer, Serials] = defaultdict(Serials)
        self._gone: list[Peer] = []
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._check.socket, zmq.POLLIN)
        self.port = self._bind(address, port)

    def hear(self, seconds: float) -> Iterator[Heard]:
        """Wait up to `seconds` for messages, and yield all that have arrived."""
        deadline = time.monotonic() + seconds
        while not self._socket.poll(0):
            left = max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(int(1000 * left)))
            if self._check.socket in ready:
                self._admit_or_refuse()
            elif self._socket not in ready:
                break
        while self._ends.poll(
            0
        ):  # before messages: a new connection may reuse the descriptor of one that ended
            peer = self._peers.pop(recv_monitor_message(self._ends)["value"], None)
            if peer is not None:
                self._gone.append(peer)
        while self._socket.poll(0):
            heard = self._receive()
            if heard is not None:
                yield heard

    def has_ended(self, peer: Peer | None) -> bool:
        """Test whether a connection has ended, and the next call of `gone` will return it."""
        return peer in self._gone

    def gone(self) -> list[Peer]:
        """Return the connections that ended since the last call; all their messages have been received by then."""
        gone, self._gone = self._gone, []
        return gone

    def say(self, peer: Peer, message: LauncherSays) -> None:
        """Send a message to a node; the message is dropped if the connection has ended.

        Raises:
            BadInput: the message is longer than a node accepts.
        """
        data = pack(self._said[peer].number(message))
        if len(data) > LONGEST:
            raise BadInput(
                f"the message {type(message).__name__} to a node takes {len(data):,} bytes, and may take {LONGEST:,}: "
                "give fewer or shorter prompts at a time"
            )
        self._socket.send_multipart([peer, data])

    def close(self) -> None:
        """Close the channel; wait up to two seconds until the last messages are sent."""
        self._check.close()
        self._socket.disable_monitor()
        self._ends.close()
        self._socket.close()
        self._context.term()

    def _admit_or_refuse(self) -> None:
        """Admit or refuse one peer that tried to connect."""
        attempt = self._check.answer()
        if not attempt.admitted and len(self.refused) < LOGGED:
            self.refused.append(attempt.address)
            _log.warning("refused: unknown key", peer=attempt.address, key=attempt.key)

    def _receive(self) -> Heard | None:
        frames = self._socket.recv_multipart(copy=False)
        peer, last = frames[0].bytes, frames[-1]
        self._peers[last.get(zmq.SRCFD)] = peer
        address = str(last.get("Peer-Address"))
        try:
            if len(frames) != 2:
                raise Unreadable(f"{len(frames)} frames are not a message")
            message = read_node(last.bytes)
        except Unreadable as error:
            _log.warning("dropped an unreadable message", peer=address, why=str(error))
            return None
        if not self._heard[peer].is_new(message):
            _log.warning("dropped a message that was sent before", peer=address)
            return None
        return Heard(peer, str(last.get("User-Id")), address, message)

    def _bind(self, address: str, port: int) -> int:
        self._socket.ipv6 = is_ipv6(address)
        try:
            self._socket.bind(endpoint(listening_at(address), port))
        except zmq.ZMQError as error:
            self.close()
            raise BadInput(cannot_listen(address, port, error)) from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(bound.rpartition(":")[2])


def cannot_listen(address: str, port: int, error: zmq.ZMQError) -> str:
    """Return the error message for a socket that cannot be bound: the reason, and a remedy."""
    if error.errno == zmq.EADDRINUSE:
        return (
            f"port {port} of {address} is in use: end the process that listens there, or choose another port"
        )
    if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
        return not_here(address)
    return f"cannot listen on {place(address, port)}: {error.strerror}"
