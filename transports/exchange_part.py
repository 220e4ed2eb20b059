"""The part of one rank in an exchange, in which it sends frames to the other ranks and receives theirs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import zmq

from moesched.errors import RankLost, TransportError
from moesched.seams import Exchange
from moesched.system.plain_text import plain_text

from .frames import NAMES, NOTHING, PIECES, Frame, Kind, pack
from .listener import Message
from .waiting import CLOSED, TransportState, check_waiting, is_gone

if TYPE_CHECKING:
    from moesched.seams import Array

ROOM_MILLISECONDS = 2
"""Milliseconds before a frame is offered again to a rank whose queue is full."""

TELL_SECONDS = 5.0
"""Seconds for which a rank that gives up tries to tell ranks that may not have started, within its timeout."""


class ExchangePart:
    """A rank's part in one exchange: a context manager that tells the other ranks the reason if an error leaves it.

    Enter the context only while `state.calling`, a lock, is held.

    Args:
        state: the state of this rank's transport.
        operation: ALL_REDUCE, BROADCAST or GATHER; ABANDON for a rank that takes no part.
        part: the rank's array; in an all-reduce, all ranks' arrays must have one shape and dtype.
    """

    __slots__ = (
        "_announced", "_came", "_exchange", "_operation", "_part", "_root", "_sequence", "_state", "_told", "_until",
    )  # fmt: skip

    def __init__(
        self,
        state: TransportState,
        operation: Kind,
        rank: int,
        exchange: Exchange,
        part: Array | None = None,
        root: int = 0,
    ) -> None:
        if rank != state.rank or not (root == 0 or root in state.others or root == rank):
            raise TransportError(
                f"{NAMES[operation]} #{exchange.ticket}: asked for rank {rank} and root {root} of rank {state.rank} of "
                f"{len(state.others) + 1}"
            )
        self._state = state
        self._operation = operation
        self._exchange = exchange
        self._part = part
        self._root = root
        self._came: dict[Kind, dict[int, Array]] = {}
        self._announced = False
        self._told = False

    def __enter__(self) -> ExchangePart:
        state = self._state
        try:
            self._until = time.monotonic() + state.timeout_seconds
            self._sequence = state.sequence
            state.sequence += 1
            if state.closed:
                raise TransportError(CLOSED)
            for frame in state.inbox.begin(self._sequence):
                self._keep(frame)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if not self._told and not self._state.closed:
            self.abandon(
                str(error) or type(error).__name__, error.ranks if isinstance(error, RankLost) else ()
            )
        where = f"{NAMES[self._operation]} #{self._exchange.ticket}: "
        if isinstance(error, RankLost):
            raise RankLost(where + str(error), error.ranks) from None
        if isinstance(error, (TransportError, zmq.ZMQError)):
            raise TransportError(where + str(error)) from None

    def go_on(self, kind: Kind, came: dict[int, Array], message: Message | None) -> None:
        """Take over what has arrived so far: arrays in frames of this kind, and one message that is not decoded yet.

        Args:
            came: the arrays, by the rank that sent them.
            message: the message; None if there is none.
        """
        self._came.setdefault(kind, {}).update(came)
        if message is not None:
            self._accept(message)

    def send(self, kind: Kind, ranks: Iterable[int], values: Array) -> None:
        """Send the elements of an array to ranks, in frames of this kind; waits while a rank's queue is full."""
        self._send(ranks, pack(self._frame(kind, values)))

    def receive(self, kind: Kind, ranks: Iterable[int]) -> dict[int, Array]:
        """Wait until an array has come from each of `ranks` in frames of this kind; return the arrays by rank.

        In an all-reduce, frames of some kinds (`PIECES`) hold a piece of an array, which is returned one-dimensional.
        """
        came = self._came.setdefault(kind, {})
        wanted = set(ranks)
        while missing := wanted - came.keys():
            message = self._state.mesh.receive()
            if message is None:
                self._pause(missing)
            else:
                self._accept(message)
        return came

    def abandon(self, reason: str, lost: Iterable[int] = ()) -> None:
        """Tell the other ranks that this rank gives up the exchange, the reason, and the ranks that it has lost."""
        self._told = True
        values = np.array(list(lost), np.int64)
        frame = self._frame(Kind.ABANDON, values, plain_text(reason))
        here = [rank for rank in self._state.others if not is_gone(self._state, rank)]
        self._tell(here, frame, time.monotonic() + min(TELL_SECONDS, self._state.timeout_seconds))

    def _frame(self, kind: Kind, values: Array, text: str | None = None) -> Frame:
        state = self._state
        ticket, signature, step, layer = self._exchange
        shape = values.shape if self._part is None or kind is Kind.ABANDON else self._part.shape
        if text is None:
            text = signature
        return Frame(
            kind, self._operation, state.rank, state.epoch, self._sequence, ticket, step, layer, self._root,
            shape, text, values,
        )  # fmt: skip

    def _waiting(self) -> Frame:
        """Return the frame that describes this rank's exchange, without elements."""
        return self._frame(Kind.WAITING, NOTHING if self._part is None else self._part.reshape(-1)[:0])

    def _send(self, ranks: Iterable[int], data: bytes | memoryview) -> None:
        state, mesh = self._state, self._state.mesh
        if len(data) > mesh.max_bytes:
            raise TransportError(f"{len(data)} bytes at once; at most {mesh.max_bytes} are accepted")
        for rank in ranks:
            while not mesh.send(rank, data):
                check_waiting(state, {rank}, self._sequence, self._until)
                message = mesh.receive() if mesh.poll(ROOM_MILLISECONDS) else None
                if message is not None:
                    self._accept(message)

    def _accept(self, message: Message) -> None:
        """Keep the frame of a message that arrived, if the frame belongs to this exchange; refuse a duplicate."""
        state = self._state
        frame = state.inbox.accept(message)
        if frame is not None and not self._keep(frame):
            state.mesh.refuse(message, "it is a duplicate")

    def _keep(self, frame: Frame) -> bool:
        """Keep another rank's frame of this exchange; returns False for a second frame of its kind.

        Raises:
            RankLost: the other rank gave up because a rank is lost.
            TransportError: the other rank gave up for another reason, or is in another exchange.
        """
        if frame.kind is Kind.ABANDON:
            self._told = True
            problem = f"rank {frame.rank} gave up: {frame.text}"
            lost = tuple(int(each) for each in frame.values)
            raise RankLost(problem, lost) if lost else TransportError(problem)
        self._check(frame)
        if frame.kind is Kind.WAITING:
            return True
        came = self._came.setdefault(frame.kind, {})
        if frame.rank in came:
            return False
        came[frame.rank] = frame.values if frame.kind in PIECES else frame.values.reshape(frame.shape)
        return True

    def _check(self, frame: Frame) -> None:
        """Check that the rank that sent a frame is in the same exchange as this rank.

        Raises:
            TransportError: the ranks are in different exchanges; the message names both exchanges.
        """
        if self._operation is Kind.ABANDON:
            return
        mine = self._waiting()
        if mine.names_the_same_as(frame):
            return
        said = sorted([(mine.rank, mine.describe()), (frame.rank, frame.describe())])
        raise TransportError(
            "the ranks disagree on it: " + "; ".join(f"rank {n}: {what}" for n, what in said)
        )

    def _pause(self, missing: set[int]) -> None:
        """Check that the missing ranks can still come; called after some time without a message.

        The first call also describes this exchange to the missing ranks, which may wait in another one.
        """
        check_waiting(self._state, missing, self._sequence, self._until)
        if not self._announced:
            self._announced = True
            self._tell(missing, self._waiting())

    def _tell(self, ranks: Iterable[int], frame: Frame, until: float = 0.0) -> None:
        """Send a frame to each rank that can take it before the time `until` on the monotonic clock; 0 tries once."""
        data = pack(frame)
        for rank in ranks:
            while not self._state.mesh.send(rank, data) and time.monotonic() < until:
                time.sleep(ROOM_MILLISECONDS / 1000)
