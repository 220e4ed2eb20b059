"""Adaptive replacement: a cache that balances recency against frequency by what it regrets to have evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from moesched.models.layout import Page


class AdaptiveReplacement:
    """ARC (Megiddo and Modha, FAST 2003), as Fate (arXiv 2502.12224) uses it.

    Pages that were used in one step are kept apart from those that were used in several. Each part remembers as many
    pages as it lost; one of these that comes back shifts the balance towards its part.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._lost_recent: OrderedDict[int, None] = OrderedDict()
        self._lost_frequent: OrderedDict[int, None] = OrderedDict()
        self._came: dict[int, int] = {}
        """By page of the cache, the step in which it came."""
        self._target = 0.0
        """The number of pages that were used once that the cache should have."""

    def used(self, page: Page, step: int, tokens: int) -> None:
        number = page.id
        if number in self._frequent:
            self._frequent.move_to_end(number)
        elif number in self._recent:
            if step > self._came[number]:
                del self._recent[number]
                self._frequent[number] = None
        elif not tokens:
            self._came[number] = step
            self._add(number)

    def choose(self, pages: Mapping[int, Page]) -> Page:
        self._forget_all_but(len(pages))
        parts = [(self._recent, self._lost_recent), (self._frequent, self._lost_frequent)]
        if len(self._recent) <= self._target:
            parts.reverse()
        for part, lost in parts:
            number = _first(part, pages)
            if number is not None:
                del part[number]
                lost[number] = None
                return pages[number]
        return next(iter(pages.values()))

    def _add(self, number: int) -> None:
        """Add a page that comes, and learn from one that should have stayed."""
        lost_recent, lost_frequent = self._lost_recent, self._lost_frequent
        if number in lost_recent:
            self._target += max(1.0, len(lost_frequent) / len(lost_recent))
            del lost_recent[number]
        elif number in lost_frequent:
            self._target = max(0.0, self._target - max(1.0, len(lost_recent) / len(lost_frequent)))
            del lost_frequent[number]
        else:
            self._recent[number] = None
            return
        self._frequent[number] = None

    def _forget_all_but(self, size: int) -> None:
        """Remember no more lost pages than the cache has room for."""
        self._target = min(self._target, size)
        for lost in (self._lost_recent, self._lost_frequent):
            while len(lost) > size:
                lost.popitem(last=False)


def _first(part: Iterable[int], pages: Mapping[int, Page]) -> int | None:
    return next((number for number in part if number in pages), None)
