"""One rank's part in one exchange: it sends, waits for others, and finds out why they do not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import zmq

from moesched.errors import RankLost, TransportError
from moesched.seams import Exchange

from .frames import NAMES, NOTHING, Frame, Kind, cut, pack
from .inbox import Inbox
from .mesh import Mesh

if TYPE_CHECKING:
    from moesched.seams import Array

ROOM_MILLISECONDS = 2
"""How long to wait before a frame is offered again to a rank that could not take it."""

TELL_SECONDS = 1.0
"""How long a rank that gives up tries to reach those who may not have started yet."""

LAST_WORDS_SECONDS = 0.25
"""What a rank sent before its connection ended may take so long to be read."""


class Side(Protocol):
    """The rank whose turn it is.

    Attributes:
        calling: held by the turn that is on.
        sequence: how many turns there were.
    """

    rank: int
    epoch: int
    others: tuple[int, ...]
    closed: bool
    timeout_seconds: float
    mesh: Mesh
    inbox: Inbox
    calling: threading.Lock
    sequence: int


class Turn:
    """One rank's part in one exchange, as a context: whoever leaves it with an error tells the others why.

    Args:
        side: the rank.
        operation: ALL_REDUCE, BROADCAST or GATHER; ABANDON for a rank that takes no part.
        part: what the rank brings; parts of an all-reduce must be alike.
    """

    def __init__(
        self, side: Side, operation: Kind, exchange: Exchange, part: Array | None = None, root: int = 0
    ) -> None:
        ticket, signature, step, layer = exchange
        self._side = side
        self._announced = False
        self._told = False
        self._until = 0.0
        self._frame = Frame(
            Kind.WAITING,
            operation,
            side.rank,
            side.epoch,
            ticket=ticket,
            step=step,
            layer=layer,
            root=root,
            shape=() if part is None else part.shape,
            values=NOTHING if part is None else np.empty(0, part.dtype),
            text=cut(signature),
        )

    def __enter__(self) -> Turn:
        side = self._side
        side.calling.acquire()
        try:
            self._check_open()
            self._until = time.monotonic() + side.timeout_seconds
            self._frame = self._frame._replace(sequence=side.sequence)
            side.sequence += 1
            for frame in side.inbox.begin(self._frame.sequence):
                self._check(frame)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                return
            if not self._told and not self._side.closed:
                self.abandon(str(error) or type(error).__name__, getattr(error, "ranks", ()))
        finally:
            self._side.calling.release()
        prefix = f"{NAMES[self._frame.operation]} #{self._frame.ticket}: "
        if isinstance(error, RankLost):
            raise RankLost(prefix + str(error), error.ranks) from None
        if isinstance(error, (TransportError, zmq.ZMQError)):
            raise TransportError(prefix + str(error)) from None

    def send(self, kind: Kind, ranks: Iterable[int], values: Array) -> None:
        """Send elements to ranks, once they can take them."""
        data = pack(self._frame._replace(kind=kind, values=values))
        if len(data) > self._side.mesh.max_bytes:
            raise TransportError(
                f"{len(data)} bytes at once; at most {self._side.mesh.max_bytes} are taken in"
            )
        for rank in ranks:
            while not self._side.mesh.send(rank, data):
                self._check_waiting({rank})
                if self._side.mesh.poll(ROOM_MILLISECONDS):
                    self._receive()

    def receive(self, kind: Kind, ranks: Iterable[int]) -> dict[int, Frame]:
        """The frames of that kind that these ranks send in this exchange."""
        found: dict[int, Frame] = {}
        missing = set(ranks)
        inbox = self._side.inbox
        while True:
            for rank in tuple(missing):
                frame = inbox.take(rank, kind)
                if frame is not None:
                    found[rank] = frame
                    missing.discard(rank)
            if not missing:
                return found
            if not self._receive():
                self._check_waiting(missing)
                self._announce(missing)

    def abandon(self, reason: str, lost: Iterable[int] = ()) -> None:
        """Tell the others that this rank takes no part, and which ranks it misses."""
        self._told = True
        values = np.array(list(lost), np.int64)
        frame = self._frame._replace(kind=Kind.ABANDON, shape=values.shape, values=values, text=reason)
        here = [rank for rank in self._side.others if not self._gone(rank)]
        self._tell(here, frame, time.monotonic() + TELL_SECONDS)

    def _receive(self) -> bool:
        frame = self._side.inbox.receive()
        if frame is not None:
            self._check(frame)
        return frame is not None

    def _check(self, frame: Frame) -> None:
        """Whether another rank is in the same exchange.

        Raises:
            RankLost, TransportError: it gave up, or names another one.
        """
        if frame.kind is Kind.ABANDON:
            self._told = True
            problem = f"rank {frame.rank} gave up: {frame.text}"
            lost = tuple(int(each) for each in frame.values)
            raise RankLost(problem, lost) if lost else TransportError(problem)
        mine = self._frame
        if mine.operation is Kind.ABANDON:
            return
        named = (frame.ticket, frame.step, frame.layer, frame.root, frame.text, frame.operation)
        if named == (mine.ticket, mine.step, mine.layer, mine.root, mine.text, mine.operation) and (
            frame.operation is not Kind.ALL_REDUCE
            or (frame.shape == mine.shape and frame.values.dtype == mine.values.dtype)
        ):
            return
        said = sorted([(mine.rank, mine.describe()), (frame.rank, frame.describe())])
        raise TransportError(
            "the ranks disagree on it: " + "; ".join(f"rank {n}: {what}" for n, what in said)
        )

    def _check_waiting(self, missing: set[int]) -> None:
        """Whether it makes sense to wait on for these ranks.

        Raises:
            RankLost, TransportError: it does not.
        """
        self._check_open()
        side = self._side
        for rank in sorted(missing):
            ahead = side.inbox.reached.get(rank)
            if ahead is not None and ahead.sequence > self._frame.sequence:
                raise TransportError(f"rank {rank} went on without it, to {ahead.describe()}")
        lost = {rank: side.inbox.left[rank] for rank in sorted(missing) if rank in side.inbox.left}
        for rank in missing - set(lost):
            if side.mesh.watch.lost(rank, LAST_WORDS_SECONDS):
                lost[rank] = "its connection ended"
        if lost:
            said = "; ".join(f"rank {rank} is lost: {why}" for rank, why in sorted(lost.items()))
            raise RankLost(said, tuple(sorted(lost)))
        if time.monotonic() > self._until:
            raise TransportError(self._late(missing))

    def _late(self, missing: set[int]) -> str:
        trouble = self._side.mesh.watch.trouble
        said = "".join(f"; rank {each}: {trouble[each]}" for each in sorted(missing) if each in trouble)
        ranks = ", ".join(str(each) for each in sorted(missing))
        return f"rank {ranks} did not come in {self._side.timeout_seconds:g} s{said}"

    def _announce(self, missing: set[int]) -> None:
        """Tell those who are late which exchange this rank is in: they may wait for it in another one."""
        if not self._announced:
            self._announced = True
            self._tell(missing, self._frame)

    def _tell(self, ranks: Iterable[int], frame: Frame, until: float = 0.0) -> None:
        """Send a frame to whoever can take it in time."""
        data = pack(frame)
        for rank in ranks:
            while not self._side.mesh.send(rank, data) and time.monotonic() < until:
                time.sleep(ROOM_MILLISECONDS / 1000)

    def _gone(self, rank: int) -> bool:
        return rank in self._side.inbox.left or self._side.mesh.watch.lost(rank, 0.0)

    def _check_open(self) -> None:
        if self._side.closed:
            raise TransportError("the transport was closed")
