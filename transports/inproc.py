"""Collectives between ranks that are threads of one process."""

from __future__ import annotations

import threading
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

from moesched.errors import TransportError


class InprocTransport:
    """Ranks meet in memory: the last one to arrive adds all parts up, and each gets a copy of its own.

    Args:
        ranks: how many there are.
        timeout_seconds: how long a rank waits for the others.
    """

    def __init__(self, ranks: int = 1, *, timeout_seconds: float = 60.0) -> None:
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self._exchanges: dict[int, _Exchange] = {}
        self._changed = threading.Condition()
        self._closed = False

    def all_reduce(self, rank: int, ticket: int, tensor: Any) -> Any:
        """The sum of all ranks' tensors, added in the order of the ranks.

        Raises:
            TransportError: a rank did not come in time, gave up, or came twice; the transport was closed.
        """
        with self._changed:
            exchange = self._come(rank, ticket)
            exchange.parts[rank] = tensor
            if len(exchange.parts) == self.ranks and not exchange.problem:
                exchange.total = reduce(add, (exchange.parts[each] for each in range(self.ranks)))
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended(exchange), self.timeout_seconds):
                missing = ", ".join(str(each) for each in range(self.ranks) if each not in exchange.came)
                self._break(exchange, f"rank {missing} did not come in {self.timeout_seconds:g} s")
            if exchange.problem:
                raise TransportError(f"all-reduce #{ticket}: {exchange.problem}")
            return deepcopy(exchange.total)

    def abandon(self, rank: int, ticket: int, reason: str) -> None:
        """Say that a rank will not take part, so that the others need not wait for the timeout."""
        with self._changed:
            self._break(self._come(rank, ticket), f"rank {rank} gave up: {reason}")

    async def aclose(self) -> None:
        """Wake the ranks that wait, each with an error."""
        with self._changed:
            self._closed = True
            for exchange in self._exchanges.values():
                self._break(exchange, "the transport was closed")

    def _come(self, rank: int, ticket: int) -> _Exchange:
        """Note that a rank came to an exchange, which the last one to come takes off the books."""
        if self._closed:
            raise TransportError(f"all-reduce #{ticket}: the transport was closed")
        exchange = self._exchanges.setdefault(ticket, _Exchange())
        if rank in exchange.came or not 0 <= rank < self.ranks:
            raise TransportError(
                f"all-reduce #{ticket}: rank {rank} of {self.ranks} came twice, or is none of them"
            )
        exchange.came.add(rank)
        if len(exchange.came) == self.ranks:
            del self._exchanges[ticket]
        return exchange

    def _ended(self, exchange: _Exchange) -> bool:
        return len(exchange.parts) == self.ranks or bool(exchange.problem)

    def _break(self, exchange: _Exchange, problem: str) -> None:
        exchange.problem = exchange.problem or problem
        self._changed.notify_all()


class _Exchange:
    """One all-reduce: who came, what they brought, what came out or went wrong."""

    def __init__(self) -> None:
        self.came: set[int] = set()
        self.parts: dict[int, Any] = {}
        self.total: Any = None
        self.problem = ""
