"""Who may come in to the launcher: strangers are refused and logged."""

from __future__ import annotations

from collections.abc import Mapping

import structlog
import zmq

from moesched.cluster.curve.zap import LOGGED, KeyCheck

_log = structlog.get_logger(__name__)


class Door:
    """Lets in who has a key of the cluster's. Poll `socket`, and `answer` when it has something.

    Args:
        known: who has which public key. Whoever is in is known by its key, as each message's `User-Id`.

    Attributes:
        refused: addresses of the first that were refused, in order.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: Mapping[str, str]) -> None:
        self._check = KeyCheck(context, {key: key for key in known})
        self.socket = self._check.socket
        self.refused: list[str] = []

    def answer(self) -> None:
        """Let one peer in or not."""
        knock = self._check.answer()
        if not knock.let_in and len(self.refused) < LOGGED:
            self.refused.append(knock.address)
            _log.warning("refused: its key is none of the cluster's", peer=knock.address, key=knock.key)

    def close(self) -> None:
        """Answer nobody any more."""
        self._check.close()
