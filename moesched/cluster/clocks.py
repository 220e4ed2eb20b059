"""Measures the offset between two machines' clocks by round trips of messages (Cristian's algorithm).

Clocks of two machines drift apart by some 20 to 50 microseconds a second. So the offset is measured anew every few
seconds, and interpolated between two measurements.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec

WINDOW_NANOSECONDS = 5 * 10**9
"""Length of a window; its shortest round trip gives its offset. Drift changes offsets by up to 0.25 ms in a window."""


class ClockOffset(msgspec.Struct, frozen=True):
    """The offset of a node's clock from the launcher's.

    Attributes:
        offset: nanoseconds by which the node's clock is ahead.
        error: bound of the offset's error in nanoseconds: half of the shortest round trip.
    """

    offset: int
    error: int


class ClockMeter:
    """Measures how far another machine's clock is ahead of this one, from round trips of messages.

    Attributes:
        best: the offset from the shortest round trip; None before the first answer.
    """

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self.best: ClockOffset | None = None
        self._windows: list[tuple[int, ClockOffset]] = []
        """For each window: the other clock's time, and the offset from the window's shortest round trip."""
        self._window_end = 0

    def ask(self, number: int, now: int) -> None:
        """Record that request `number` was sent at `now` nanoseconds; only the last 64 requests are remembered."""
        self._sent = {each: sent for each, sent in self._sent.items() if each > number - 64}
        self._sent[number] = now

    def answer(self, number: int, clock: int, now: int) -> None:
        """Measure the offset from an answer to request `number`; an unknown number is ignored.

        Args:
            clock: the time on the other clock, in nanoseconds.
            now: the time on this clock, in nanoseconds.
        """
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        measured = ClockOffset(clock - (sent + now) // 2, (now - sent + 1) // 2)
        if self.best is None or measured.error <= self.best.error:
            self.best = measured
        if not self._windows or now >= self._window_end:
            self._windows.append((clock, measured))
            self._window_end = now + WINDOW_NANOSECONDS
        elif measured.error <= self._windows[-1][1].error:
            self._windows[-1] = (clock, measured)

    def ahead_at(self, clock: int) -> int:
        """Return the nanoseconds by which the other clock is ahead when it shows `clock` ns; 0 if none is measured."""
        windows = self._windows
        if not windows:
            return 0
        place = bisect_right(windows, clock, key=lambda window: window[0])
        if place in (0, len(windows)):
            return windows[max(0, place - 1)][1].offset
        (start, before), (end, after) = windows[place - 1 : place + 1]
        return before.offset + (after.offset - before.offset) * (clock - start) // (end - start)
