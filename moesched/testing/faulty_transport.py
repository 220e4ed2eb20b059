"""A transport that injects faults of networks and programs, at random or at a given exchange."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from moesched.errors import BadInput, RankLost, TransportError
from moesched.seams import Exchange, Transport
from moesched.system.own_loop import run_on_own_loop
from moesched.testing.slow_transports import DelayingTransport
from moesched.testing.wrapping_transport import Call, abandon

if TYPE_CHECKING:
    from moesched.seams import Array

T = TypeVar("T")


class Faults(NamedTuple):
    """Faults to inject; `drop`, `corrupt` and `delay` are shares of all calls, from 0 to 1.

    Attributes:
        drop: the rank's call fails; the others are told if the transport can do so.
        corrupt: a bit of the rank's part is flipped.
        delay: the rank's call starts later, by up to `delay_seconds`.
        swap_at: the rank takes this exchange and the next one in the other order.
        lose_at: from this exchange on, the rank is lost: its transport is closed.
    """

    drop: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    delay_seconds: float = 0.01
    swap_at: int | None = None
    lose_at: int | None = None


class FaultyTransport(DelayingTransport):
    """Injects faults into a rank's calls. The same seed gives the same faults, whatever the threads do.

    Raises:
        BadInput: a share is not between 0 and 1, or the delay is negative.
    """

    def __init__(self, transport: Transport, faults: Faults, seed: int = 0) -> None:
        super().__init__(transport, faults.delay_seconds)
        for name in ("drop", "corrupt", "delay"):
            if not 0 <= getattr(faults, name) <= 1:
                raise BadInput(f"{name} {getattr(faults, name)} is not a share of the calls: give 0 to 1")
        self._faults = faults
        self._seed = seed

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Call the wrapped transport, with faults."""
        return super().all_reduce(rank, self._swapped(exchange), self._corrupted(rank, exchange, part))

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Call the wrapped transport, with faults."""
        brought = None if array is None else self._corrupted(rank, exchange, array)
        return super().broadcast(rank, self._swapped(exchange), brought, root)

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Call the wrapped transport, with faults."""
        return super().gather(rank, self._swapped(exchange), self._corrupted(rank, exchange, part), root)

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Run a call, unless a fault prevents it.

        Raises:
            RankLost: the rank is lost.
            TransportError: its call was dropped.
        """
        faults, ticket = self._faults, call.exchange.ticket
        where = f"{call.operation} #{ticket}"
        if faults.lose_at is not None and ticket >= faults.lose_at:
            run_on_own_loop(self.transport.aclose)
            raise RankLost(f"{where}: rank {call.rank} is lost: injected fault", (call.rank,))
        if self._happens("drop", faults.drop, call.rank, ticket):
            abandon(self.transport, call, "its part was dropped")
            raise TransportError(f"{where}: the part of rank {call.rank} was dropped: injected fault")
        if self._happens("delay", faults.delay, call.rank, ticket):
            self.wait(call, faults.delay_seconds * self._random("how long", call.rank, ticket).random())
        return run()

    def _swapped(self, exchange: Exchange) -> Exchange:
        at = self._faults.swap_at
        if at is None or exchange.ticket not in (at, at + 1):
            return exchange
        return exchange._replace(ticket=2 * at + 1 - exchange.ticket)

    def _corrupted(self, rank: int, exchange: Exchange, part: Array) -> Array:
        if not part.nbytes or not self._happens("corrupt", self._faults.corrupt, rank, exchange.ticket):
            return part
        changed = np.array(part, order="C")
        random = self._random("which bit", rank, exchange.ticket)
        changed.reshape(-1).view(np.uint8)[random.randrange(part.nbytes)] ^= 1 << random.randrange(8)
        return changed

    def _happens(self, what: str, share: float, rank: int, ticket: int) -> bool:
        return share > 0 and self._random(what, rank, ticket).random() < share

    def _random(self, what: str, rank: int, ticket: int) -> Random:
        return Random(f"{self._seed} {what} {rank} {ticket}")
