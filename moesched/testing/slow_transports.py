"""Transports that take longer: by a fixed time, or as long as a slower network would take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from moesched.errors import BadInput, TransportError
from moesched.seams import Transport
from moesched.testing.wrapping_transport import Call, WrappingTransport

T = TypeVar("T")


class DelayingTransport(WrappingTransport):
    """Delays every call.

    Args:
        seconds: the delay.

    Raises:
        BadInput: the delay is negative.
    """

    def __init__(self, transport: Transport, seconds: float) -> None:
        super().__init__(transport)
        self._delay = _not_negative("delay in seconds", seconds)
        self._closed = threading.Event()

    async def aclose(self) -> None:
        """Wake the calls that wait, and close the wrapped transport."""
        self._closed.set()
        await super().aclose()

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Wait, then run the call."""
        self.wait(call, self._delay)
        return run()

    def wait(self, call: Call, seconds: float) -> None:
        """Wait, unless the transport is closed meanwhile.

        Raises:
            TransportError: the transport was closed.
        """
        if self._closed.wait(seconds) if seconds > 0 else self._closed.is_set():
            raise TransportError(f"{call.operation} #{call.exchange.ticket}: the transport was closed")


class ThrottlingTransport(DelayingTransport):
    """Makes calls take at least as long as on a network of some latency and bandwidth.

    Args:
        latency_seconds: latency of one exchange.
        bandwidth: bytes per second.

    Raises:
        BadInput: the latency is negative, or the bandwidth is not above 0.
    """

    def __init__(self, transport: Transport, latency_seconds: float, bandwidth: float) -> None:
        super().__init__(transport, 0.0)
        self._latency = _not_negative("latency in seconds", latency_seconds)
        if not bandwidth > 0:
            raise BadInput(f"a bandwidth of {bandwidth:g} bytes per second; it must be more than 0")
        self._bandwidth = bandwidth

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Run the call, then wait until the network would have finished it."""
        began = time.perf_counter()
        value = run()
        due = self._latency + call.nbytes / self._bandwidth
        self.wait(call, due - (time.perf_counter() - began))
        return value


def _not_negative(what: str, value: float) -> float:
    if not value >= 0:
        raise BadInput(f"a {what} of {value:g}; it must be 0 or more")
    return value
