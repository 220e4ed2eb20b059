"""Collectives between ranks that are threads of one process, in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

from moesched.errors import TransportError
from moesched.seams import Exchange

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
        total: Array = self._meet("all-reduce", rank, exchange, part, _sum)
        return total.copy()

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return the root's array on every rank; other ranks pass None as `array`. Raises as `all_reduce`."""
        sent: Array = self._meet("broadcast", rank, exchange, array, partial(_sent_by, root))
        return sent.copy()

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return all ranks' parts in rank order, on the root; None on the other ranks. Raises as `all_reduce`."""
        parts: list[Array] = self._meet("gather", rank, exchange, part, _copies)
        return parts if rank == root else None

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """Tell the other ranks the reason why this rank takes no part in an exchange, so that they do not wait."""
        with self._changed:
            self._break(self._come(rank, exchange, "exchange"), f"rank {rank} gave up: {reason}")

    async def aclose(self) -> None:
        """Close the transport; ranks that wait in an exchange get an error."""
        with self._changed:
            self._closed = True
            for meeting in self._meetings.values():
                self._break(meeting, "the transport was closed")

    def _meet(
        self, what: str, rank: int, exchange: Exchange, part: Any, result: Callable[[Sequence[Any]], T]
    ) -> T:
        """Bring a rank's part to an exchange and wait for the other ranks; return `result` of the parts of all ranks.

        what: the kind of collective, which must be equal on all ranks. result: function of all parts, in rank order.
        """
        with self._changed:
            meeting = self._come(rank, exchange, what)
            meeting.parts[rank] = part
            if len(meeting.parts) == self.ranks and not meeting.problem:
                try:
                    meeting.result = result([meeting.parts[each] for each in range(self.ranks)])
                except TransportError as error:
                    meeting.problem = str(error)
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended(meeting), self.timeout_seconds):
                missing = ", ".join(str(each) for each in range(self.ranks) if each not in meeting.came)
                self._break(meeting, f"rank {missing} did not come in {self.timeout_seconds:g} s")
            if meeting.problem:
                raise TransportError(f"{what} #{exchange.ticket}: {meeting.problem}")
            found: T = meeting.result
            return found

    def _come(self, rank: int, exchange: Exchange, what: str) -> _Meeting:
        """Record that a rank has begun an exchange; returns the object that collects the parts of all ranks.

        what: name of the collective, for error messages.

        Raises:
            TransportError: the transport is closed, the rank came twice or does not exist, or the ranks disagree.
        """
        ticket = exchange.ticket
        if self._closed:
            raise TransportError(f"{what} #{ticket}: the transport was closed")
        meeting = self._meetings.setdefault(ticket, _Meeting())
        if rank in meeting.came or not 0 <= rank < self.ranks:
            raise TransportError(
                f"{what} #{ticket}: rank {rank} of {self.ranks} came twice, or does not exist"
            )
        meeting.came[rank] = exchange.signature
        if len(set(meeting.came.values())) > 1:
            said = "; ".join(f"rank {each}: {signature}" for each, signature in sorted(meeting.came.items()))
            self._break(meeting, f"the ranks disagree on it: {said}")
        if len(meeting.came) == self.ranks:
            del self._meetings[ticket]
        return meeting

    def _ended(self, meeting: _Meeting) -> bool:
        return len(meeting.parts) == self.ranks or bool(meeting.problem)

    def _break(self, meeting: _Meeting, problem: str) -> None:
        meeting.problem = meeting.problem or problem
        self._changed.notify_all()


def _sum(parts: Sequence[Array]) -> Array:
    """Return the sum of all parts, in order; raises TransportError if their shapes or dtypes differ."""
    kinds = [f"{part.dtype} {part.shape}" for part in parts]
    if len(set(kinds)) > 1:
        said = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise TransportError(f"the ranks disagree on it: {said}")
    return reduce(add, parts)


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
    """One exchange in progress: the signatures and parts of the ranks, and the result, or the problem that ended it."""

    def __init__(self) -> None:
        self.came: dict[int, str] = {}
        self.parts: dict[int, Any] = {}
        self.result: Any = None
        self.problem = ""
