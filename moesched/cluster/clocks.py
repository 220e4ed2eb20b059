"""Offsets between the clocks of machines, from round trips of messages (Cristian's algorithm)."""

from __future__ import annotations

import msgspec


class ClockOffset(msgspec.Struct, frozen=True):
    """The offset of a node's clock from the launcher's.

    Attributes:
        offset: nanoseconds by which the node's clock is ahead.
        error: bound of the offset's error in nanoseconds: half of the shortest round trip.
    """

    offset: int
    error: int


class ClockMeter:
    """Measures the offset of one clock, and keeps the result of the shortest round trip."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self.best: ClockOffset | None = None

    def ask(self, number: int, now: int) -> None:
        """Note that a request is sent; old ones without an answer are dropped."""
        self._sent = {each: sent for each, sent in self._sent.items() if each > number - 64}
        self._sent[number] = now

    def answer(self, number: int, clock: int, now: int) -> None:
        """Take in an answer; one to an unknown request is ignored.

        Args:
            clock: the time on the other clock.
            now: the time on this one.
        """
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        error = (now - sent + 1) // 2
        if self.best is None or error <= self.best.error:
            self.best = ClockOffset(clock - (sent + now) // 2, error)
