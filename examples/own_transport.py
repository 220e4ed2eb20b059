"""A transport between threads of a process. Written from `moesched.seams.Transport` alone.

    python examples/own_transport.py

The command checks the transport's promises, and has three ranks add up their arrays.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from threading import Condition
from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.errors import TransportError
from moesched.seams import Exchange
from moesched.testing import check_transport

Array = npt.NDArray[Any]


class ThreadTransport:
    """Ranks meet at a lock: each adds its part, and copies all parts once every rank has arrived.

    Args:
        ranks: number of threads that meet.
        timeout_seconds: how long a rank waits for the others.
    """

    def __init__(self, ranks: int, timeout_seconds: float = 30.0) -> None:
        self._ranks = ranks
        self._timeout = timeout_seconds
        self._lock = Condition()
        self._meetings: dict[int, Meeting] = {}
        self._closed = False

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Sum the parts in the order of the ranks."""
        total: Array = reduce(add, self._meet(rank, exchange, part))
        return total

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Take the root's part."""
        arrays: list[Array] = self._meet(rank, exchange, array)
        return arrays[root]

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Take all parts on the root."""
        parts = self._meet(rank, exchange, part)
        return parts if rank == root else None

    async def aclose(self) -> None:
        """Fail the calls that still wait."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _meet(self, rank: int, exchange: Exchange, part: Array | None) -> list[Any]:
        """Copies of the parts of all ranks, in their order."""
        with self._lock:
            meeting = self._meetings.setdefault(exchange.ticket, Meeting())
            meeting.parts[rank] = part if part is None else part.copy()
            meeting.signatures[rank] = exchange.signature
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._closed or self._all_in(meeting), self._timeout)
            if not self._all_in(meeting):
                missing = sorted(set(range(self._ranks)) - meeting.parts.keys())
                raise TransportError(f"rank {rank} waited for ranks {missing} in exchange {exchange.ticket}")
            if len(set(meeting.signatures.values())) > 1:
                raise TransportError(
                    f"the ranks disagree on exchange {exchange.ticket}: {meeting.signatures}"
                )
            meeting.left += 1
            if meeting.left == self._ranks:
                del self._meetings[exchange.ticket]
            parts = [meeting.parts[each] for each in range(self._ranks)]
        return [part if part is None else part.copy() for part in parts]

    def _all_in(self, meeting: Meeting) -> bool:
        return len(meeting.parts) == self._ranks


class Meeting:
    """The parts of one exchange in progress."""

    def __init__(self) -> None:
        self.parts: dict[int, Array | None] = {}
        self.signatures: dict[int, str] = {}
        self.left = 0


def main() -> None:
    """Check the transport, and add up the arrays of three ranks."""
    check_transport(lambda ranks: [ThreadTransport(ranks)] * ranks)
    print(
        "ThreadTransport keeps its promises: the same bits on every rank, or an error that names the exchange"
    )
    transport = ThreadTransport(3)
    with ThreadPoolExecutor(3) as pool:
        parts = [np.array([rank, 10.0]) for rank in range(3)]
        sums = pool.map(lambda rank: transport.all_reduce(rank, Exchange(0), parts[rank]), range(3))
        for rank, total in enumerate(sums):
            print(f"rank {rank} has {parts[rank]} and gets {total}")


if __name__ == "__main__":
    main()
