"""Times of events on streams, on the host's clock: CUDA gives float32 milliseconds, and its clock drifts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple

PERIOD = 1_000_000_000
"""Nanoseconds after which an event is recorded to measure from: float32 is exact to 60 ns over a second."""

KEPT = 64
"""Number of such events that are remembered; those before were read long ago."""


class Zero(NamedTuple):
    """An event that others are measured from.

    Attributes:
        device, host: when it happened, in nanoseconds: on the device's clock since the first one, and by our reckoning.
        rate: the host's nanoseconds for each of the device's, from then on.
        read: when it happened by the host's clock.
    """

    event: Any
    device: float
    host: float
    rate: float
    read: int


class StreamClock:
    """Translates events of one device to the clock of `time.perf_counter_ns`; later events never get earlier times.

    Not safe for several threads at once.

    Args:
        new_event: makes an event that keeps its time.
        stream: one without work, on which events happen at once.
        clock: the host's clock in nanoseconds.
    """

    def __init__(
        self, new_event: Callable[[], Any], stream: Any, clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self._new_event = new_event
        self._stream = stream
        self._clock = clock
        event, read = self._recorded()
        self._zeros = [Zero(event, 0.0, read, 1.0, read)]

    def zero(self) -> Zero:
        """The event to measure a task from that is issued now."""
        if self._clock() - self._zeros[-1].read > PERIOD:
            self._zeros = [*self._zeros[-KEPT + 1 :], self._following(self._zeros[-1])]
        return self._zeros[-1]

    def nanoseconds(self, event: Any, zero: Zero) -> int:
        """When an event happened that was recorded after `zero` was given."""
        device: float = zero.device + zero.event.elapsed_time(event) * 1e6
        zeros = self._zeros
        last = zeros[max(0, bisect_right(zeros, device, key=lambda each: each.device) - 1)]
        nanoseconds: float = last.host + (device - last.device) * last.rate
        return round(nanoseconds)

    def _following(self, last: Zero) -> Zero:
        """The next zero, where the last one's times end; its rate makes up for what these were wrong by."""
        event, read = self._recorded()
        passed = last.event.elapsed_time(event) * 1e6
        host = last.host + passed * last.rate
        true_rate = (read - last.read) / passed
        return Zero(event, last.device + passed, host, max(0.5, true_rate - (host - read) / PERIOD), read)

    def _recorded(self) -> tuple[Any, int]:
        """An event, and the middle of the time in which it happened."""
        event = self._new_event()
        before = self._clock()
        event.record(self._stream)
        event.synchronize()
        return event, (before + self._clock()) // 2
