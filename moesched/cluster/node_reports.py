"""A node's reports to the launcher on an order (a request to generate tokens): progress, tokens, results, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from time import perf_counter
from typing import Literal

import msgspec

from moesched.cluster.messages import (
    PIECE_BYTES,
    Done,
    Failed,
    FailureKind,
    Loaded,
    Loading,
    NodeSays,
    Order,
    Piece,
    Prepared,
    Tokens,
)
from moesched.errors import MoeschedError
from moesched.inputs.options import SizeOptions
from moesched.system.plain_text import plain_text

Content = Literal["report", "recording"]


class NodeReports:
    """Reports a node's progress on its current order to the launcher.

    Args:
        say: sends a message to the launcher.

    Attributes:
        order: the current order; None before the first.
    """

    def __init__(self, say: Callable[[NodeSays], None]) -> None:
        self.order: Order | None = None
        self._say = say
        self._digest = sha256()
        self._place = 0
        self._since = 0.0
        self._waited = 0.0

    def prepared(self, port: int, sizes: SizeOptions, placement: list[list[int]]) -> None:
        """Report that the order is planned: the transport's port, batch sizes that fit, the experts of each node."""
        order = self._current
        self._say(Prepared(epoch=order.epoch, order=order.order, port=port, sizes=sizes, placement=placement))

    def begin(self) -> None:
        """Start to measure time, to number the messages with tokens, and to hash tokens, for the current order."""
        self._digest, self._place = sha256(), 0
        self._since, self._waited = perf_counter(), 0.0

    def loading(self, done: int, total: int) -> None:
        """Report that `done` of `total` resident pages are loaded."""
        if self.order is not None:
            self._say(Loading(epoch=self.order.epoch, done=done, total=total))

    def loaded(self) -> None:
        """Report that all resident weights are loaded."""
        order = self._current
        self._say(Loaded(epoch=order.epoch, order=order.order))

    def tokens(self, fresh: dict[int, list[int]], ended: Sequence[int], waited: float) -> None:
        """Report new tokens, given in `fresh` by request.

        Args:
            ended: requests that end with these tokens.
            waited: seconds spent in exchanges since the order began.
        """
        now = perf_counter()
        self._digest.update(msgspec.msgpack.encode(list(fresh.items())))
        self._say(
            Tokens(
                epoch=self._current.epoch,
                order=self._current.order,
                place=self._place,
                tokens=fresh,
                ended=list(ended),
                seconds=now - self._since,
                waited=waited - self._waited,
            )
        )
        self._place += 1
        self._since, self._waited = now, waited

    def content(self, what: Content, content: msgspec.Struct) -> None:
        """Send a report or a recording to the launcher in pieces.

        Args:
            what: "report" or "recording", the kind of `content`.
        """
        order = self._current
        data = msgspec.msgpack.encode(content)
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            last = start + PIECE_BYTES >= len(data)
            self._say(Piece(epoch=order.epoch, order=order.order, what=what, data=piece, last=last))

    def done(self, failure: str) -> None:
        """Report the end of the order; `failure` is the reason if it ended early, else empty."""
        order = self._current
        self._say(
            Done(epoch=order.epoch, order=order.order, digest=self._digest.hexdigest(), failure=failure)
        )

    def failed(self, kind: FailureKind, error: MoeschedError, places: Sequence[int] = ()) -> None:
        """Report that the order cannot be carried out because of `error`.

        Args:
            kind: "input", "lost", "stopped" or "other", as in the message `Failed`.
            places: indices, among the order's members, of nodes that cannot be reached any more.
        """
        order = self.order
        self._say(
            Failed(
                epoch=order.epoch if order else 0,
                order=order.order if order else 0,
                gone=[order.members[place] for place in places] if order else [],
                kind=kind,
                message=plain_text(" ".join(str(error).split())),
            )
        )

    @property
    def _current(self) -> Order:
        assert self.order is not None, "a launcher begins only what it ordered"
        return self.order
