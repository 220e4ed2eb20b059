"""ZeroMQ's authentication protocol (ZAP, RFC 27): decides for CURVE sockets whether to admit a peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

LOGGED = 100
"""Largest number of refusals that are logged, so that a flood of them does not fill the disk."""

_ENDPOINT = "inproc://zeromq.zap.01"


class Attempt(NamedTuple):
    """An attempt of a peer to connect, and the decision on it.

    Attributes:
        address: the peer's address; empty for a peer on this machine.
        key: the peer's public key, as text; empty if the peer sent none.
        admitted: whether the peer was admitted.
    """

    address: str
    key: str
    admitted: bool


class KeyCheck:
    """Admits peers for all CURVE sockets of a ZeroMQ context. Poll `socket`, and call `answer` when it is readable.

    Args:
        users: the peers to admit: for each public key, the `User-Id` that messages of this peer will carry.
    """

    def __init__(self, context: zmq.Context[Any], users: Mapping[str, str]) -> None:
        self._users = dict(users)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> Attempt:
        """Admit or refuse one peer that tried to connect; return the peer and the decision."""
        version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and len(credentials) == 1 else ""
        user = self._users.get(key)
        verdict = (b"400", b"unknown key", b"") if user is None else (b"200", b"", user.encode())
        self.socket.send_multipart([version, request, *verdict, b""])
        return Attempt(address.decode(errors="replace"), key, user is not None)

    def close(self) -> None:
        """Close the socket; no peer is admitted from then on."""
        self.socket.close()
