"""Who may come in: a CURVE server asks here about each key, and strangers are refused and logged (ZAP, RFC 27)."""

from __future__ import annotations

from collections.abc import Mapping

import structlog
import zmq
from zmq.utils import z85

_log = structlog.get_logger(__name__)

LOGGED = 100
"""Refusals beyond these are not logged, so that a flood of them fills no disk."""

_ENDPOINT = "inproc://zeromq.zap.01"


class Door:
    """Answers for all CURVE servers of one ZeroMQ context. Poll `socket`, and `answer` when it has something.

    Args:
        known: who has which public key.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: Mapping[str, str]) -> None:
        self._known = dict(known)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)
        self.refused: list[str] = []
        """Addresses of the first that were refused, in order."""

    def answer(self) -> None:
        """Let one peer in or not; whoever is in is known by its key, as each message's `User-Id`."""
        version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        if key in self._known:
            self.socket.send_multipart([version, request, b"200", b"", key.encode(), b""])
            return
        if len(self.refused) < LOGGED:
            where = address.decode(errors="replace")
            self.refused.append(where)
            _log.warning("refused: its key is none of the cluster's", peer=where, key=key)
        self.socket.send_multipart([version, request, b"400", b"unknown key", b"", b""])

    def close(self) -> None:
        """Answer nobody any more."""
        self.socket.close()
