"""By how much another machine's clock is ahead of this one's, from messages there and back (Cristian's algorithm)."""

from __future__ import annotations

import msgspec


class ClockOffset(msgspec.Struct, frozen=True):
    """How far a node's clock is ahead of the launcher's.

    Attributes:
        offset: in nanoseconds.
        error: by how much it may be wrong at most, had the shortest trip been as one-sided as can be; nanoseconds.
    """

    offset: int
    error: int


class ClockMeter:
    """The offset of one clock: of all trips there and back the shortest tells it best."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self.best: ClockOffset | None = None

    def ask(self, number: int, now: int) -> None:
        """A question leaves; those that were never answered are forgotten."""
        self._sent = {each: sent for each, sent in self._sent.items() if each > number - 64}
        self._sent[number] = now

    def answer(self, number: int, clock: int, now: int) -> None:
        """The answer is here: what the other clock said, and what this one says; others than asked for are ignored."""
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        error = (now - sent + 1) // 2
        if self.best is None or error <= self.best.error:
            self.best = ClockOffset(clock - (sent + now) // 2, error)
