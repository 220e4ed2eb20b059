"""The translation of times of CUDA events to the host's clock; CUDA has float32 milliseconds and a drifting clock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple

PERIOD = 1_000_000_000
"""Nanoseconds after which a new zero is recorded: over a second, float32 is exact to 60 ns."""

KEPT = 64
"""Number of zeros that are remembered."""

NARROW = 20_000
"""Nanoseconds between the readings of the host's clock before and after a zero, for it to count as exact."""
TRIES = 8
"""Most recordings of a zero until it is exact; the host may be interrupted between the readings."""

ALIKE = 100
"""Nanoseconds up to which times of the device count as one, since float32 does not tell their order."""

REPORTED = 1024
"""Number of reported times that are remembered, so that later ones keep the order."""


class Zero(NamedTuple):
    """An event from which the times of others are measured.

    Attributes:
        device: its time on the device's clock, in nanoseconds since the first zero.
        host: its time on the host's clock in nanoseconds, computed from the zero before.
        rate: nanoseconds of the host's clock for each of the device's, from then on.
        read: its time in nanoseconds as it was read from the host's clock.
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
        """The time of an event on the device's clock, in nanoseconds; it must have been recorded after `zero`."""
        passed: float = zero.event.elapsed_time(event)
        return zero.device + passed * 1e6

    def reckoned(self, device: float) -> int:
        """Translate a time of the device to the host's clock, by the last zero before it and that zero's rate."""
        zeros = self._zeros
        last = zeros[max(0, bisect_right(zeros, device, key=lambda each: each.device) - 1)]
        return round(last.host + (device - last.device) * last.rate)

    def reported(self, device: float, host: int) -> int:
        """The time to report for a time of the device: `host`, moved so far that reports keep the device's order."""
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
        """Record the zero after `last`; its rate makes up for the error of the computed time within a period."""
        event, read = self._recorded()
        passed = last.event.elapsed_time(event) * 1e6
        host = last.host + passed * last.rate
        true_rate = (read - last.read) / passed
        return Zero(event, last.device + passed, host, max(0.5, true_rate - (host - read) / PERIOD), read)

    def _recorded(self) -> tuple[Any, int]:
        """Record an event, again if it is not exact; returns it and its time as read from the host's clock."""
        width, event, middle = self._recorded_once()
        for _ in range(TRIES - 1):
            if width <= NARROW:
                break
            width, event, middle = min(
                (width, event, middle), self._recorded_once(), key=lambda each: each[0]
            )
        return event, middle

    def _recorded_once(self) -> tuple[int, Any, int]:
        """Record an event; returns the interval of the host's clock in which it happened: its width, and its middle."""
        event = self._new_event()
        before = self._clock()
        event.record(self._stream)
        event.synchronize()
        after = self._clock()
        return after - before, event, (before + after) // 2
