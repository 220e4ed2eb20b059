"""Adaptive replacement (ARC): an eviction rule that learns from refetched pages to weigh recency and frequency."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from moesched.models.layout import Page


class AdaptiveReplacement:
    """Eviction rule: ARC (Megiddo and Modha, FAST 2003), as Fate (arXiv 2502.12224) uses it.

    The rule keeps two lists: pages used in only one step, and pages used in several steps. For each list the rule also
    remembers pages evicted from the list, at most as many as the cache holds. If a remembered page is fetched again,
    the target size of its list grows and the target size of the other list shrinks.
    """

    def __init__(self) -> None:
        self._parts: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict())
        """The lists of pages used in one step, and in several: the step in which each page came, by the page's id."""
        self._lost: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._target = 0.0
        """Target number of cached pages that were used in one step only."""

    def used(self, page: Page, step: int, tokens: int) -> None:
        recent, frequent = self._parts
        if page.id in frequent:
            frequent.move_to_end(page.id)
        elif page.id in recent:
            if step > recent[page.id]:
                frequent[page.id] = recent.pop(page.id)
        elif not tokens:
            self._parts[self._learn(page.id)][page.id] = step

    def choose(self, pages: Mapping[int, Page]) -> Page:
        self._target = min(self._target, len(pages))
        order = (0, 1) if len(self._parts[0]) > self._target else (1, 0)
        number = next((n for part in order for n in self._parts[part] if n in pages), next(iter(pages)))
        for part, lost in zip(self._parts, self._lost, strict=True):
            while len(lost) > len(pages):
                lost.popitem(last=False)
            if number in part:
                del part[number]
                lost[number] = None
        return pages[number]

    def _learn(self, number: int) -> bool:
        """Adapt the target sizes of the two lists, if a page that enters the cache is a remembered, evicted one.

        number: id of the page.

        Returns:
            Whether the page was remembered; the page then joins the list of pages used in several steps.
        """
        recent, frequent = self._lost
        if number in recent:
            self._target += max(1.0, len(frequent) / len(recent))
            del recent[number]
        elif number in frequent:
            self._target = max(0.0, self._target - max(1.0, len(recent) / len(frequent)))
            del frequent[number]
        else:
            return False
        return True
