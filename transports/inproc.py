"""Collectives between ranks that are threads of one process, in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from moesched.errors import TransportError
from moesched.seams import Exchange

from .frames import NAMES, NOTHING, Frame, Kind
from .sums import sum_in_order

if TYPE_CHECKING:
    from moesched.seams import Array

T = TypeVar("T")


class InprocTransport:
    """Carries out collectives in memory: the last rank to arrive computes the result, and each gets a copy of its own.

    Args:
        ranks: number of ranks.
        timeout_seconds: time that a rank waits for the others.
    """

    def __init__(self, ranks: int = 1, *, timeout_seconds: float = 60.0) -> None:
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self._meetings: dict[int, _Meeting] = {}
        self._changed = threading.Condition()
        self._closed = False

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Return the sum of all ranks' parts in `exchange`, added in rank order; `rank` is the number of this rank.

        Raises:
            TransportError: a rank did not arrive in time, gave up, arrived twice, is in another exchange, or has an
                array of another shape or dtype; or the transport was closed.
        """
        total: Array = self._meet(Kind.ALL_REDUCE, rank, exchange, part, 0, sum_in_order)
        return total.copy()

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return the root's array on every rank; other ranks pass None as `array`. Raises as `all_reduce`."""
        sent: Array = self._meet(Kind.BROADCAST, rank, exchange, array, root, partial(_sent_by, root))
        return sent.copy()

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return all ranks' parts in rank order, on the root; None on the other ranks. Raises as `all_reduce`."""
        parts: list[Array] = self._meet(Kind.GATHER, rank, exchange, part, root, _copies)
        return parts if rank == root else None

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """Tell the other ranks the reason why this rank takes no part in an exchange, so that they do not wait."""
        with self._changed:
            self._break(self._come(Kind.ABANDON, rank, exchange, None, 0), f"rank {rank} gave up: {reason}")

    async def aclose(self) -> None:
        """Close the transport; ranks that wait in an exchange get an error."""
        with self._changed:
            self._closed = True
            for meeting in self._meetings.values():
                self._break(meeting, "the transport was closed")

    def _meet(
        self,
        operation: Kind,
        rank: int,
        exchange: Exchange,
        part: Any,
        root: int,
        result: Callable[[Sequence[Any]], T],
    ) -> T:
        """Bring a rank's part to an exchange and wait for the other ranks; return `result` of the parts of all ranks.

        Args:
            result: function of all parts, in rank order.
        """
        with self._changed:
            meeting = self._come(operation, rank, exchange, part, root)
            meeting.parts[rank] = part
            if len(meeting.parts) == self.ranks and not meeting.problem:
                try:
                    meeting.result = result([meeting.parts[each] for each in range(self.ranks)])
                except TransportError as error:
                    meeting.problem = str(error)
                except BaseException as error:
                    self._break(meeting, f"rank {rank} gave up: {error!r}")
                    raise
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended(meeting), self.timeout_seconds):
                missing = ", ".join(str(each) for each in range(self.ranks) if each not in meeting.came)
                self._break(meeting, f"rank {missing} did not come in {self.timeout_seconds:g} s")
            if meeting.problem:
                raise TransportError(f"{NAMES[operation]} #{exchange.ticket}: {meeting.problem}")
            found: T = meeting.result
            return found

    def _come(
        self, operation: Kind, rank: int, exchange: Exchange, part: Array | None, root: int
    ) -> _Meeting:
        """Record that a rank has begun a collective; returns the object that collects the parts of all ranks.

        If the ranks describe the exchange differently, the object's `problem` says so. Descriptions are compared field
        by field, with the same fields as in transports between processes.

        Raises:
            TransportError: the transport is closed, the rank came twice or does not exist, or there is no such root.
        """
        ticket, signature, step, layer = exchange
        where = f"{NAMES[operation]} #{ticket}"
        if self._closed:
            raise TransportError(f"{where}: the transport was closed")
        if not 0 <= root < self.ranks:
            raise TransportError(f"{where}: asked for root {root} of {self.ranks} ranks")
        meeting = self._meetings.setdefault(ticket, _Meeting())
        if rank in meeting.came or not 0 <= rank < self.ranks:
            raise TransportError(f"{where}: rank {rank} of {self.ranks} came twice, or does not exist")
        shape, values = ((), NOTHING) if part is None else (part.shape, part.reshape(-1)[:0])
        mine = Frame(
            Kind.WAITING, operation, rank, ticket=ticket, step=step, layer=layer, root=root, shape=shape,
            text=signature, values=values,
        )  # fmt: skip
        meeting.came[rank] = mine
        if operation is not Kind.ABANDON and not all(map(mine.names_the_same_as, meeting.came.values())):
            said = "; ".join(
                f"rank {each}: {frame.describe()}" for each, frame in sorted(meeting.came.items())
            )
            self._break(meeting, f"the ranks disagree on it: {said}")
        if len(meeting.came) == self.ranks:
            del self._meetings[ticket]
        return meeting

    def _ended(self, meeting: _Meeting) -> bool:
        return len(meeting.parts) == self.ranks or bool(meeting.problem)

    def _break(self, meeting: _Meeting, problem: str) -> None:
        meeting.problem = meeting.problem or problem
        self._changed.notify_all()


def _sent_by(root: int, parts: Sequence[Array | None]) -> Array:
    """Return a copy of the root's array, since the root may change the array once it has its result.

    Raises:
        TransportError: the root passed no array.
    """
    array = parts[root]
    if array is None:
        raise TransportError("the root has nothing to send")
    return array.copy()


def _copies(parts: Sequence[Array]) -> list[Array]:
    """Return copies of all parts, since ranks may change their parts once they have their results."""
    return [part.copy() for part in parts]


class _Meeting:
    """One exchange in progress: the calls and parts of the ranks, and the result, or the problem that ended it."""

    def __init__(self) -> None:
        self.came: dict[int, Frame] = {}
        self.parts: dict[int, Any] = {}
        self.result: Any = None
        self.problem = ""
