"""A transport that makes exchanges take as long as a slower network would: it wraps another one.

    python examples/slow_transport.py

The command has two ranks add up their arrays over a network of 10 ms and 1 MB/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moesched.plugins import find
from moesched.seams import Exchange, Transport

Array = npt.NDArray[Any]
T = TypeVar("T")


class SlowTransport:
    """Passes every call on, and waits until the network would have finished it.

    Args:
        latency_seconds: of one exchange.
        bandwidth: bytes per second.
    """

    def __init__(self, transport: Transport, latency_seconds: float, bandwidth: float) -> None:
        self._transport = transport
        self._latency, self._bandwidth = latency_seconds, bandwidth

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Return the sum of all ranks' parts, on every rank."""
        return self._slowly(part.nbytes, lambda: self._transport.all_reduce(rank, exchange, part))

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return the root's array, on every rank."""
        nbytes = 0 if array is None else array.nbytes
        return self._slowly(nbytes, lambda: self._transport.broadcast(rank, exchange, array, root))

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return all ranks' parts on the root; None on the others."""
        return self._slowly(part.nbytes, lambda: self._transport.gather(rank, exchange, part, root))

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self._transport.aclose()

    def _slowly(self, nbytes: int, call: Callable[[], T]) -> T:
        began = time.monotonic()
        value = call()
        time.sleep(max(0.0, began + self._latency + nbytes / self._bandwidth - time.monotonic()))
        return value


def main() -> None:
    """Add up the arrays of two ranks."""
    slow = SlowTransport(find("transports", "inproc")(2), latency_seconds=0.01, bandwidth=1e6)
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        parts = [np.full(5_000, rank, np.float32) for rank in range(2)]
        sums = list(pool.map(lambda rank: slow.all_reduce(rank, Exchange(0), parts[rank]), range(2)))
        took = time.monotonic() - began
    print(f"both ranks have the sum: {all((total == 1).all() for total in sums)}")
    print(f"20 KB took at least 30 ms: {took >= 0.03}")


if __name__ == "__main__":
    main()
