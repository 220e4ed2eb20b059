"""A base for transports that wrap another one: they see every call and pass it on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from moesched.seams import Abandons, Exchange, Transport

if TYPE_CHECKING:
    from moesched.seams import Array

T = TypeVar("T")


class Call(NamedTuple):
    """One rank's part in one exchange.

    Attributes:
        operation: all_reduce, broadcast or gather.
        nbytes: bytes of the array that the rank passes in; 0 if it only receives one.
    """

    operation: str
    rank: int
    exchange: Exchange
    nbytes: int


class WrappingTransport:
    """Passes every call on to another transport; subclasses override `around`."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Call the wrapped transport."""
        call = Call("all_reduce", rank, exchange, part.nbytes)
        return self.around(call, lambda: self.transport.all_reduce(rank, exchange, part))

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Call the wrapped transport."""
        call = Call("broadcast", rank, exchange, 0 if array is None else array.nbytes)
        return self.around(call, lambda: self.transport.broadcast(rank, exchange, array, root))

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Call the wrapped transport."""
        call = Call("gather", rank, exchange, part.nbytes)
        return self.around(call, lambda: self.transport.gather(rank, exchange, part, root))

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self.transport.aclose()

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Run a call of the wrapped transport, whose errors pass through."""
        return run()


def abandon(transport: Transport, call: Call, reason: str) -> None:
    """Tell the other ranks why this one does not take part, if the transport can."""
    if isinstance(transport, Abandons):
        with suppress(Exception):  # the caller has a better error to raise
            transport.abandon(call.rank, call.exchange, reason)
