"""ZeroMQ's questions about keys (ZAP, RFC 27): a CURVE server asks here who may come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

LOGGED = 100
"""Refusals beyond these are not logged, so that a flood of them fills no disk."""

_ENDPOINT = "inproc://zeromq.zap.01"


class Knock(NamedTuple):
    """Somebody who wanted to come in.

    Attributes:
        address: from where; empty on this machine.
        key: the public key, as text; empty where there was none.
    """

    address: str
    key: str
    let_in: bool


class KeyCheck:
    """Answers for all CURVE servers of one ZeroMQ context. Poll `socket`, and `answer` when it has something.

    Args:
        users: whose public key is let in, by the key: what each message says of its sender, as `User-Id`.
    """

    def __init__(self, context: zmq.Context[Any], users: Mapping[str, str]) -> None:
        self._users = dict(users)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> Knock:
        """Let one peer in or not."""
        version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and len(credentials) == 1 else ""
        user = self._users.get(key)
        verdict = (b"400", b"unknown key", b"") if user is None else (b"200", b"", user.encode())
        self.socket.send_multipart([version, request, *verdict, b""])
        return Knock(address.decode(errors="replace"), key, user is not None)

    def close(self) -> None:
        """Answer nobody any more."""
        self.socket.close()
