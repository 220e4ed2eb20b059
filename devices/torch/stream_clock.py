"""Times of events on streams, on the host's clock: CUDA measures in float32 milliseconds, and its clock drifts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple

PERIOD = 1_000_000_000
"""Nanoseconds after which an event is recorded to measure from: float32 is exact to 60 ns over a second."""

KEPT = 64
"""Number of such events that are remembered; those before were read long ago."""

NARROW = 20_000
"""Nanoseconds within which such an event should happen between two readings of the host's clock."""
TRIES = 8
"""Most recordings of one until it does; the host may be interrupted in between."""

ALIKE = 100
"""Nanoseconds between times of the device whose order float32 does not tell: they count as one time."""

REPORTED = 1024
"""Number of times that are remembered, with which later ones have to agree."""


class Zero(NamedTuple):
    """An event from which the times of others are measured.

    Attributes:
        device: its time on the device's clock, in nanoseconds since the first zero.
        host: its computed time on the host's clock, in nanoseconds.
        rate: the host's nanoseconds for each of the device's, from then on.
        read: its time as it was read from the host's clock.
    """

    event: Any
    device: float
    host: float
    rate: float
    read: int


class StreamClock:
    """Translates times of one device's events to the host's clock, in an order that never runs backwards.

    Not safe for several threads at once.

    Args:
        new_event: makes an event that keeps its time.
        stream: a stream without work, on which events happen at once.
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
        self._reported: list[tuple[float, int]] = []

    def zero(self) -> Zero:
        """The event from which the times of a task that is issued now are measured."""
        if self._clock() - self._zeros[-1].read > PERIOD:
            self._zeros = [*self._zeros[-KEPT + 1 :], self._following(self._zeros[-1])]
        return self._zeros[-1]

    def on_device(self, event: Any, zero: Zero) -> float:
        """The time of an event on the device's clock, in nanoseconds; it was recorded after `zero` was given."""
        passed: float = zero.event.elapsed_time(event)
        return zero.device + passed * 1e6

    def reckoned(self, device: float) -> int:
        """Translate a time of the device to the host's clock, by the zero before it and that zero's rate."""
        zeros = self._zeros
        last = zeros[max(0, bisect_right(zeros, device, key=lambda each: each.device) - 1)]
        return round(last.host + (device - last.device) * last.rate)

    def reported(self, device: float, host: int) -> int:
        """The host's time to report for a time of the device: near to `host`, and in order with earlier reports."""
        reported = self._reported
        place = bisect_left(reported, (device,))
        for time, host_time in reported[max(0, place - 1) : place + 1]:
            if abs(time - device) < ALIKE:
                return host_time
        if place:
            host = max(host, reported[place - 1][1])
        if place < len(reported):
            host = min(host, reported[place][1])
        reported.insert(place, (device, host))
        del reported[:-REPORTED]
        return host

    def _following(self, last: Zero) -> Zero:
        """The reference event after `last`; its rate makes up for the error of `last` within a period."""
        event, read = self._recorded()
        passed = last.event.elapsed_time(event) * 1e6
        host = last.host + passed * last.rate
        true_rate = (read - last.read) / passed
        return Zero(event, last.device + passed, host, max(0.5, true_rate - (host - read) / PERIOD), read)

    def _recorded(self) -> tuple[Any, int]:
        """Record an event; returns it and the middle of the interval in which it happened, on the host's clock."""
        width, event, middle = self._recorded_once()
        for _ in range(TRIES - 1):
            if width <= NARROW:
                break
            width, event, middle = min(
                (width, event, middle), self._recorded_once(), key=lambda each: each[0]
            )
        return event, middle

    def _recorded_once(self) -> tuple[int, Any, int]:
        event = self._new_event()
        before = self._clock()
        event.record(self._stream)
        event.synchronize()
        after = self._clock()
        return after - before, event, (before + after) // 2
