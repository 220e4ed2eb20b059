"""The watch over the connections of a mesh: admits peers by their keys, notices lost connections, logs refusals.

A thread answers ZeroMQ's requests to authenticate peers, and reads the monitors of all sockets. The thread wakes only
for handshakes and lost connections.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from moesched.cluster.curve.zap import LOGGED, KeyCheck
from moesched.system.logs import Log

_log = Log(__name__)

MAPPED = "::ffff:"
"""Prefix of an IPv4 address in IPv6 notation."""

_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not known here",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak the protocol, or not with the right key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up, or said nothing for too long",
}
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
for _event in _FAILED:
    _EVENTS |= _event


class Watch:
    """Watches the sockets of one mesh, on a thread of its own.

    Args:
        context: the context of the sockets; ZeroMQ asks about keys once for each context.
        public: the ranks' public keys; None to admit every peer.

    Attributes:
        connected: the lower ranks that this rank is connected to.
        lost: the lower ranks whose connection has ended at least once.
        trouble: the reason why the last attempt to connect to a rank failed, by rank.
        refusal: the last refusal of a connection, in words; empty if none was refused.
        ended: the time at which an accepted connection ended last, on the monotonic clock.
        refused: number of connections and frames that were refused.
    """

    def __init__(self, context: zmq.Context[Any], public: Mapping[str, int] | None) -> None:
        self.connected: set[int] = set()
        self.lost: set[int] = set()
        self.trouble: dict[int, str] = {}
        self.refusal = ""
        self.ended = -math.inf
        self.refused = 0
        self._address = "unknown"
        self._monitors: dict[Any, int | None] = {}
        self._watched: list[zmq.Socket[bytes]] = []
        self._keys = KeyCheck(context, {key: str(rank) for key, rank in (public or {}).items()})
        self._stopped, self._stop = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stopped.bind("inproc://end of the watch")
        self._stop.connect("inproc://end of the watch")
        self._thread = threading.Thread(target=self._work, name="transport watch", daemon=True)

    def over(self, watched: zmq.Socket[bytes], peer: int | None) -> None:
        """Watch a socket of the mesh; call before `begin`.

        Args:
            peer: the rank that the socket connects to; None for the socket that listens.
        """
        self._monitors[watched.get_monitor_socket(_EVENTS)] = peer
        self._watched.append(watched)

    def begin(self) -> None:
        """Start the thread, after all sockets were passed to `over`."""
        self._thread.start()

    def end(self) -> None:
        """Stop the thread."""
        self._stop.send(b"")
        self._thread.join()
        for watched in self._watched:
            watched.disable_monitor()
        for each in (self._keys.socket, self._stopped, self._stop, *self._monitors):
            each.close(0)

    def refuse(self, what: str, why: str, address: str) -> None:
        """Count and log a refused connection or frame.

        Args:
            what: the thing refused.
            why: the reason.
            address: the address that it came from.
        """
        self.refused += 1
        address = address.removeprefix(MAPPED)
        if self.refused <= LOGGED:
            _log.warning(f"{what} was refused", address=address, why=why)
        if self.refused == LOGGED:
            _log.warning("further refusals are not logged")

    def _work(self) -> None:
        poller = zmq.Poller()
        for each in (self._stopped, self._keys.socket, *self._monitors):
            poller.register(each, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                if ready is self._stopped:
                    return
                if ready is self._keys.socket:
                    self._address = self._keys.answer().address or "this machine"
                else:
                    self._note(self._monitors[ready], recv_monitor_message(ready))

    def _note(self, peer: int | None, event: Mapping[str, Any]) -> None:
        kind, value = event["event"], event["value"]
        if peer is None:
            self._note_incoming(kind, value)
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected.add(peer)
        elif kind in _FAILED:
            self.trouble[peer] = _REFUSED_BY.get(kind, _FAILED[kind])
        elif kind == zmq.EVENT_DISCONNECTED and peer in self.connected:
            self.connected.remove(peer)
            self.lost.add(peer)

    def _note_incoming(self, kind: Any, value: int) -> None:
        """Record the address of an accepted connection, whose descriptor is `value`, or the end or refusal of one."""
        if kind == zmq.EVENT_ACCEPTED:
            self._address = _address_of(value)
        elif kind == zmq.EVENT_DISCONNECTED:
            self.ended = time.monotonic()
        elif kind in _FAILED:
            self.refusal = f"a connection from {self._address} was refused: {_FAILED[kind]}"
            self.refuse("a connection", _FAILED[kind], self._address)


_REFUSED_BY = {zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know our key"}


def _address_of(descriptor: int) -> str:
    """Return the remote address of a connection, given its descriptor; "unknown" if the connection has ended."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            name = connection.getpeername()
    except OSError:
        return "unknown"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "this machine"
