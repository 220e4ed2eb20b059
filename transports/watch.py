"""Watches over the connections of a mesh: who may come in, who came, who is gone, who was sent away.

One thread, which sleeps but for handshakes and lost connections. It answers ZeroMQ's questions about keys and reads the
monitors of all sockets.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from moesched.cluster.curve.zap import LOGGED, KeyCheck

_log = structlog.get_logger(__name__)

MAPPED = "::ffff:"
"""What IPv6 puts before the address of a peer that came over IPv4."""

_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not known here",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak the protocol, or not with the right key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up, or said nothing for too long",
}
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
for _event in _FAILED:
    _EVENTS |= _event


class Watch:
    """A thread beside the sockets of one mesh.

    Args:
        context: the sockets' own, since there is one set of keys in each.
        public: the ranks' public keys; None where everybody may come in.

    Attributes:
        trouble: why a connection to a rank did not come about, the last time that it was tried.
        refused: how many connections and frames were refused.
    """

    def __init__(self, context: zmq.Context[Any], public: Mapping[str, int] | None) -> None:
        self._lost: dict[int, float] = {}
        self.trouble: dict[int, str] = {}
        self.refused = 0
        self._here: set[int] = set()
        self._address = "unknown"
        self._monitors: dict[Any, int | None] = {}
        self._watched: list[zmq.Socket[bytes]] = []
        self._keys = KeyCheck(context, {key: str(rank) for key, rank in (public or {}).items()})
        self._told, self._tell = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._told.bind("inproc://end of the watch")
        self._tell.connect("inproc://end of the watch")
        self._thread = threading.Thread(target=self._work, name="transport watch", daemon=True)

    def over(self, watched: zmq.Socket[bytes], peer: int | None) -> None:
        """Watch over the socket that leads to a peer, or, where `peer` is None, over the one that others come to."""
        self._monitors[watched.get_monitor_socket(_EVENTS)] = peer
        self._watched.append(watched)

    def begin(self) -> None:
        """Start the thread, once it is known what it watches over."""
        self._thread.start()

    def end(self) -> None:
        """Stop it."""
        self._tell.send(b"")
        self._thread.join()
        for watched in self._watched:
            watched.disable_monitor()
        for each in (self._keys.socket, self._told, self._tell, *self._monitors):
            each.close(0)

    def lost(self, rank: int, seconds: float) -> bool:
        """Whether the connection to a rank ended, at least so long ago."""
        since = self._lost.get(rank)
        return since is not None and time.monotonic() - since > seconds

    def refuse(self, what: str, why: str, address: str) -> None:
        """Note that something was refused, and from where it came."""
        self.refused += 1
        address = address.removeprefix(MAPPED)
        if self.refused <= LOGGED:
            _log.warning(f"{what} was refused", address=address, why=why)
        if self.refused == LOGGED:
            _log.warning("further refusals are not logged")

    def _work(self) -> None:
        poller = zmq.Poller()
        for each in (self._told, self._keys.socket, *self._monitors):
            poller.register(each, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                if ready is self._told:
                    return
                if ready is self._keys.socket:
                    self._address = self._keys.answer().address or "this machine"
                else:
                    self._note(self._monitors[ready], recv_monitor_message(ready))

    def _note(self, peer: int | None, event: Mapping[str, Any]) -> None:
        kind, value = event["event"], event["value"]
        if peer is None:
            if kind == zmq.EVENT_ACCEPTED:
                self._address = _address_of(value)
            elif kind in _FAILED:
                self.refuse("a connection", _FAILED[kind], self._address)
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._here.add(peer)
        elif kind in _FAILED:
            self.trouble[peer] = _REFUSED_BY.get(kind, _FAILED[kind])
        elif kind == zmq.EVENT_DISCONNECTED and peer in self._here:
            self._lost.setdefault(peer, time.monotonic())


_REFUSED_BY = {zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know our key"}


def _address_of(descriptor: int) -> str:
    """The far end of a connection; a stranger who is sent away at once may be gone before it can be asked."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            name = connection.getpeername()
    except OSError:
        return "unknown"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "this machine"
