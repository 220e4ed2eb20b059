"""Access control of the launcher: peers with unknown keys are refused and logged."""

from __future__ import annotations

from collections.abc import Mapping

import zmq

from moesched.cluster.curve.zap import LOGGED, KeyCheck
from moesched.system.logs import Log

_log = Log(__name__)


class Door:
    """Admits peers that have a key of the cluster, for all sockets of a ZeroMQ context.

    Poll `socket`, and call `answer` when it is readable.

    Args:
        known: names of nodes by public key. An admitted peer's messages carry its key as `User-Id`.

    Attributes:
        refused: addresses of the first refused peers, in order.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: Mapping[str, str]) -> None:
        self._check = KeyCheck(context, {key: key for key in known})
        self.socket = self._check.socket
        self.refused: list[str] = []

    def answer(self) -> None:
        """Admit or refuse one peer that tried to connect."""
        knock = self._check.answer()
        if not knock.let_in and len(self.refused) < LOGGED:
            self.refused.append(knock.address)
            _log.warning("refused: unknown key", peer=knock.address, key=knock.key)

    def close(self) -> None:
        """Close the socket; no peer is admitted from then on."""
        self._check.close()
