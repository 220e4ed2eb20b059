"""The conversion of times of CUDA events to the host's clock.

CUDA tells only the time between two events: float32 milliseconds of a clock that drifts from the host's. Times are
therefore measured from "zero events", which are recorded once a second together with the host's time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from math import inf
from time import perf_counter_ns
from typing import Any, NamedTuple

PERIOD = 1_000_000_000
"""Nanoseconds after which a new zero event is recorded: within a second, float32 milliseconds are exact to 60 ns."""

KEPT = 64
"""Number of zero events that are remembered."""

NARROW = 20_000
"""Most nanoseconds between the host clock's readings before and after a zero event that counts as exact."""
TRIES = 8
"""Largest number of attempts to record a zero event that is exact; the host may be interrupted between the readings."""

ALIKE = 100
"""Times on the device's clock that are fewer nanoseconds apart count as equal: float32 does not tell their order."""

REPORTED = 1024
"""Least number of reported times that are remembered, so that later ones keep the order."""


class Zero(NamedTuple):
    """An event from which the times of later events are measured.

    Attributes:
        event: the event.
        device: the event's time on the device's clock, in nanoseconds since the first zero event.
        host: the event's time on the host's clock in nanoseconds, computed from `host` and `rate` of the previous zero
            event.
        rate: nanoseconds of the host's clock for each nanosecond of the device's clock, for times after this event.
        read: the event's time on the host's clock in nanoseconds, as read when the event was recorded.
    """

    event: Any
    device: float
    host: float
    rate: float
    read: int


class StreamClock:
    """Converts times of one device's events to the host's clock; converted times keep the order of the device's times.

    Only one thread may use a clock at a time.

    Args:
        new_event: a function that makes an event which keeps its time.
        stream: a stream without work, so that an event on it completes immediately.
        clock: returns the host's time in nanoseconds.
    """

    def __init__(
        self, new_event: Callable[[], Any], stream: Any, clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self._new_event = new_event
        self._stream = stream
        self._clock = clock
        event, read = self._recorded()
        self._zeros = [Zero(event, 0.0, read, 1.0, read)]
        self._reported: list[tuple[float, int]] = [(-inf, 0)]

    def zero(self, now: int) -> Zero:
        """Return the zero event for the times of a task that is issued at `now`; a new event is made each second.

        now: the host's time in nanoseconds.
        """
        last = self._zeros[-1]
        if now - last.read > PERIOD:
            last = self._following(last)
            self._zeros = [*self._zeros[-KEPT + 1 :], last]
        return last

    def on_device(self, event: Any, zero: Zero) -> float:
        """Return the time of an event on the device's clock, in nanoseconds since the first zero event.

        zero: a zero event that was recorded before `event`.
        """
        passed: float = zero.event.elapsed_time(event)
        return zero.device + passed * 1e6

    def reckoned(self, device: float) -> int:
        """Convert a time on the device's clock to the host's, by the times and the rate of the last `Zero` before it.

        device: nanoseconds since the first zero event.
        """
        zeros = self._zeros
        last = zeros[-1]
        if device < last.device:
            last = zeros[max(0, bisect_right(zeros, device, key=lambda each: each.device) - 1)]
        return round(last.host + (device - last.device) * last.rate)

    def reported(self, device: float, host: int) -> int:
        """Return the time on the host's clock that is to be reported for a time on the device's clock.

        This is `host`, changed as far as needed to keep reported times in the order of the device's times.

        Args:
            device: the time on the device's clock, in nanoseconds since the first zero event.
            host: an estimate of the same time on the host's clock, in nanoseconds.
        """
        last_device, last_host = self._reported[-1]
        if device - last_device < ALIKE:
            return self._reported_before(device, host)
        host = max(host, last_host)
        self._reported.append((device, host))
        if len(self._reported) > 2 * REPORTED:
            del self._reported[:-REPORTED]
        return host

    def _reported_before(self, device: float, host: int) -> int:
        """Return the host's time to report for a time on the device's clock that is not after the last reported one.

        Times less than ALIKE nanoseconds apart count as equal, and equal times get the same result. Otherwise the
        result is between those of the reported times before and after. The arguments are those of `reported`.
        """
        reported = self._reported
        place = bisect_left(reported, (device,))
        for time, host_time in reported[max(0, place - 1) : place + 1]:
            if abs(time - device) < ALIKE:
                return host_time
        least = reported[place - 1][1] if place else host
        host = min(max(host, least), reported[place][1])
        reported.insert(place, (device, host))
        return host

    def _following(self, last: Zero) -> Zero:
        """Record the zero event after `last`, and return it.

        The event's `host` has an error: its difference from `read`. The event's `rate` is the measured rate, corrected
        so that the error is 0 after PERIOD nanoseconds; a rate below 0.5 becomes 0.5.
        """
        event, read = self._recorded()
        passed = last.event.elapsed_time(event) * 1e6
        host = last.host + passed * last.rate
        true_rate = (read - last.read) / passed
        return Zero(event, last.device + passed, host, max(0.5, true_rate - (host - read) / PERIOD), read)

    def _recorded(self) -> tuple[Any, int]:
        """Record an event; returns the event and its time on the host's clock.

        The host's clock is read before and after the event. If the readings are more than NARROW nanoseconds apart, an
        event is recorded again, up to TRIES times in all, and the one with the closest readings is returned.
        """
        width, event, middle = self._recorded_once()
        for _ in range(TRIES - 1):
            if width <= NARROW:
                break
            width, event, middle = min(
                (width, event, middle), self._recorded_once(), key=lambda each: each[0]
            )
        return event, middle

    def _recorded_once(self) -> tuple[int, Any, int]:
        """Record an event, and read the host's clock before and after it.

        Returns:
            the nanoseconds between the two readings, the event, and the middle of the two readings.
        """
        event = self._new_event()
        before = self._clock()
        event.record(self._stream)
        event.synchronize()
        after = self._clock()
        return after - before, event, (before + after) // 2
