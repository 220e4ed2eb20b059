"""The slots of a KV cache, of which each request has a contiguous range."""

from __future__ import annotations

from typing import NamedTuple

from moesched.errors import OverBudget


class OutOfSlots(OverBudget):
    """An error: the KV cache has fewer free slots than a request needs."""


class Moved(NamedTuple):
    """A move of a request to other slots.

    Attributes:
        request: number of the request.
        before, after: the request's first slot before and after the move.
    """

    request: int
    before: int
    after: int


class ContiguousSlots:
    """Gives each request a range of slots, in the first gap between other requests that is wide enough.

    Args:
        count: the number of slots.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ranges: dict[int, range] = {}

    def __getitem__(self, request: int) -> range:
        """Return the range of a request's slots."""
        return self._ranges[request]

    def open(self, request: int, slots: int) -> list[Moved]:
        """Give a request a range of slots; if no gap is wide enough, other requests are first moved to close the gaps.

        Args:
            slots: number of slots.

        Returns:
            the moves of other requests, in the order in which their slots have to be copied.

        Raises:
            OutOfSlots: too few slots are free; nothing has changed.
        """
        free = self._count - sum(map(len, self._ranges.values()))
        if slots > free:
            raise OutOfSlots(f"the KV cache has {free} free slots, and request {request} needs {slots}")
        first, moved = self._gap(slots), []
        if first is None:
            first, moved = self._count - free, self._together()
        self._ranges[request] = range(first, first + slots)
        return moved

    def close(self, request: int) -> None:
        """Free a request's slots."""
        del self._ranges[request]

    def _gap(self, slots: int) -> int | None:
        """Return the first slot of the first gap of at least `slots` free slots; None if there is none."""
        stop = 0
        for each in sorted(self._ranges.values(), key=_first):
            if each.start - stop >= slots:
                return stop
            stop = each.stop
        return stop if self._count - stop >= slots else None

    def _together(self) -> list[Moved]:
        """Close all gaps by moving the ranges of slots to the front, in their order; returns the moves."""
        moved, stop = [], 0
        for request, each in sorted(self._ranges.items(), key=lambda item: _first(item[1])):
            if each.start > stop:
                moved.append(Moved(request, each.start, stop))
                self._ranges[request] = range(stop, stop + len(each))
            stop += len(each)
        return moved


def _first(slots: range) -> int:
    return slots.start
