"""A transport that can be stopped from another thread, and measures how long a node waits in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from moesched.errors import TransportError
from moesched.seams import Abandons, Exchange, Transport
from moesched.system.own_loop import run_on_own_loop

if TYPE_CHECKING:
    from moesched.seams import Array

T = TypeVar("T")


class Metered:
    """Wraps a transport so that a node's first exchange waits until all nodes are ready to exchange.

    The time limit of exchanges then does not count the loading of weights, which takes longer on a slow disk.

    Args:
        on_loaded: called just before the first exchange, which then waits until `begin` is called.

    Attributes:
        waited: seconds spent in exchanges so far.
        error: the first error of an exchange; None if there was none.
    """

    def __init__(self, transport: Transport, on_loaded: Callable[[], object]) -> None:
        self.waited = 0.0
        self.error: TransportError | None = None
        self._transport = transport
        self._stopped = ""
        self._on_loaded = on_loaded
        self._told = False
        self._begun = threading.Event()

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Return, on every rank, the sum of all ranks' `part`s in `exchange`; `rank` is the rank of this node."""
        return self._measured(lambda: self._transport.all_reduce(rank, exchange, part))

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return, on every rank, the array of the rank `root`; others pass None. `rank` is the rank of this node."""
        return self._measured(lambda: self._transport.broadcast(rank, exchange, array, root))

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return all ranks' `part`s on the rank `root`, None on the other ranks; `rank` is the rank of this node."""
        return self._measured(lambda: self._transport.gather(rank, exchange, part, root))

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """End an exchange on the ranks that wait in it for this node, with an error that gives the reason.

        Do nothing if the transport cannot end exchanges in this way.

        Args:
            rank: the rank of this node.
        """
        if isinstance(self._transport, Abandons):
            self._transport.abandon(rank, exchange, reason)

    def begin(self) -> None:
        """Allow the first exchange. Any thread may call this."""
        self._begun.set()

    def stop(self, reason: str) -> None:
        """Fail the current exchange and all later ones for this reason. Callable from any thread; returns at once.

        The transport is closed in the background, which takes longer if a peer does not read; `aclose` waits for that.
        """
        self._stopped = self._stopped or reason
        threading.Thread(
            target=run_on_own_loop, args=(self._transport.aclose,), name="closing", daemon=True
        ).start()
        self._begun.set()

    async def aclose(self) -> None:
        """Close the transport, and wait until it is closed."""
        await self._transport.aclose()

    def _measured(self, exchange: Callable[[], T]) -> T:
        started = perf_counter()
        try:
            self._wait_for_others()
            return exchange()
        except TransportError as error:
            stopped = self._stopped
            self.error = self.error or (TransportError(stopped) if stopped else error)
            raise
        finally:
            self.waited += perf_counter() - started

    def _wait_for_others(self) -> None:
        if not self._told:
            self._told = True
            self._on_loaded()
        self._begun.wait()
        if self._stopped:
            raise TransportError(self._stopped)
