"""Eviction rules, for `plan.pool(..., replacement=rule)` and for `CachedExperts`.

A rule's `choose` returns the page to evict. Make a new object for every cache. Ties are broken by the order of the
model's pages, so that equal runs evict equal pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from moesched.errors import BadInput
from moesched.models.layout import Page

HALF_LIFE = 512
"""Decode steps after which llama.cpp's expert cache halves its counts."""


class LeastRecentlyUsed:
    """Eviction rule: evict the page whose last use is the longest ago. The pool's "lru" does the same, but faster."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        """Ids of used pages, the least recently used first; ids of evicted pages are removed when they come first."""

    def used(self, page: Page, step: int, tokens: int) -> None:
        number, order = page.id, self._order
        order[number] = None
        order.move_to_end(number)

    def choose(self, pages: Mapping[int, Page]) -> Page:
        order = self._order
        while order:
            number = next(iter(order))
            if number in pages:
                return pages[number]
            del order[number]
        return next(iter(pages.values()))


class LowestRank(ABC):
    """Base of eviction rules that rank pages: evict the page of the lowest rank, of equals the first one of the model.

    Ranks are kept in a heap, so that choosing is fast in a large cache. A page's rank may rise at any time; if ranks
    fell, call `rank_all`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Page]] = []
        """(rank, id, page) of pages that came; ranks may be outdated, evicted pages are removed when they come up."""
        self._in_heap: set[int] = set()

    @abstractmethod
    def rank(self, page: Page) -> tuple[int, ...]:
        """Return the page's rank; all ranks have equal length."""

    @abstractmethod
    def used(self, page: Page, step: int, tokens: int) -> None:
        """Record a use of a page; call `add` if tokens is 0, which means that the page comes to the cache."""

    def add(self, page: Page) -> None:
        """Add a page that comes to the cache to those that may be evicted."""
        number = page.id
        if number not in self._in_heap:
            self._in_heap.add(number)
            heappush(self._heap, (self.rank(page), number, page))

    def choose(self, pages: Mapping[int, Page]) -> Page:
        heap, rank = self._heap, self.rank
        while heap:
            known, number, page = heap[0]
            if number not in pages:
                heappop(heap)
                self._in_heap.discard(number)
                continue
            now = rank(page)
            if now == known:
                return page
            heapreplace(heap, (now, number, page))
        return min(pages.values(), key=lambda page: (rank(page), page.id))

    def rank_all(self) -> None:
        """Compute the ranks of all pages anew; call it after ranks fell."""
        self._heap = [(self.rank(page), number, page) for _, number, page in self._heap]
        heapify(self._heap)


class LeastFrequentlyUsed(LowestRank):
    """Eviction rule: evict the page that the fewest tokens used in the whole run, in the cache or not."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: defaultdict[int, int] = defaultdict(int)

    def used(self, page: Page, step: int, tokens: int) -> None:
        self._tokens[page.id] += tokens
        if not tokens:
            self.add(page)

    def rank(self, page: Page) -> tuple[int, ...]:
        return (self._tokens[page.id],)


class LeastRecentStep(LowestRank):
    """Eviction rule: evict the page last used in the earliest step; of equals, the one that the fewest tokens used.

    Layers run in a fixed order: plain LRU would evict the pages of the next layers, which were used the longest ago.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, tuple[int, int]] = {}
        """By page id: the step of the page's last use, and the number of tokens that used the page so far."""

    def used(self, page: Page, step: int, tokens: int) -> None:
        number, uses = page.id, self._uses
        if number in uses:
            uses[number] = step, uses[number][1] + tokens
        else:
            uses[number] = step, tokens
        if not tokens:
            self.add(page)

    def rank(self, page: Page) -> tuple[int, ...]:
        return self._uses.get(page.id, (-1, 0))


class FrequencyClasses(LowestRank):
    """Eviction rule: evict the page of the lowest frequency class; of equals, the least recently used one.

    A page's class is the largest power of two up to the number of steps that used it, so that small differences do not
    count. These numbers are halved from time to time, so that what was popular long ago does not stay for ever.

    Modelled on the expert cache proposed for llama.cpp (pull request 24524 and its forks), which halves its counts
    every 512 decode steps and admits an expert from its second use on. Powers of two are our reading of "frequency
    classes". Admission is left to the policy, which need not fetch an expert.

    half_life: number of steps after which all numbers are halved.

    Raises:
        BadInput: the half-life is below 1.
    """

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        if half_life < 1:
            raise BadInput(f"half_life is {half_life}: give 1 step or more")
        super().__init__()
        self._half_life = half_life
        self._halved_in = 0
        self._steps: dict[int, tuple[int, int]] = {}
        """By page id: the number of steps that used the page, and the last of these steps."""
        self._recency: dict[int, int] = {}
        """By page id: the index of the page's last use among the uses of all pages."""
        self._uses = 0

    def used(self, page: Page, step: int, tokens: int) -> None:
        if step - self._halved_in >= self._half_life:
            self._halve(step)
        self._uses += 1
        self._recency[page.id] = self._uses
        steps, last = self._steps.get(page.id, (0, -1))
        if tokens and step != last:
            self._steps[page.id] = steps + 1, step
        if not tokens:
            self.add(page)

    def rank(self, page: Page) -> tuple[int, ...]:
        steps, _ = self._steps.get(page.id, (0, -1))
        return steps.bit_length(), self._recency.get(page.id, 0)

    def _halve(self, step: int) -> None:
        self._halved_in = step
        self._steps = {number: (steps // 2, last) for number, (steps, last) in self._steps.items()}
        self.rank_all()


class LeastStale:
    """Eviction rule: Least-Stale of SpecMD (Hoang et al. 2026, arXiv 2602.03921); evict pages of earlier steps first.

    Layers take turns, so recency says little: the page used the longest ago may belong to the next layer. Pages
    that this step neither used nor fetched are stale and are evicted first: those of layers that the step has passed,
    which are not needed before the next step, in the order of their layers; then those of later layers, the last layer
    first. Pages of this step follow in the same order, so prefetched pages of later layers stay the longest.

    The paper's abstract and accounts of it by others give the two criteria, the forward pass and the layer's position.
    The order within each of the four groups is our reading.
    """

    def __init__(self) -> None:
        self._step = self._layer = -1
        self._stale: dict[int, set[int]] = {}
        """By layer: ids of pages of earlier steps; those of evicted pages are removed when they come up."""
        self._fresh: dict[int, set[int]] = {}
        """By layer: ids of pages that this step used or fetched."""
        self._layers: list[int] = []

    def used(self, page: Page, step: int, tokens: int) -> None:
        layer, number = page.layer, page.id
        if step != self._step:
            self._begin(step)
        if layer not in self._stale:
            self._stale[layer], self._fresh[layer] = set(), set()
            insort(self._layers, layer)
        if tokens:
            self._layer = layer
        if not tokens or number in self._stale[layer]:
            self._stale[layer].discard(number)
            self._fresh[layer].add(number)

    def choose(self, pages: Mapping[int, Page]) -> Page:
        passed = bisect_left(self._layers, self._layer)
        order = [*self._layers[:passed], *reversed(self._layers[passed:])]
        for group in (self._stale, self._fresh):
            for layer in order:
                numbers = group[layer]
                while numbers:
                    number = min(numbers)
                    if number in pages:
                        return pages[number]
                    numbers.discard(number)
        return next(iter(pages.values()))

    def _begin(self, step: int) -> None:
        self._step, self._layer = step, -1
        for layer, fresh in self._fresh.items():
            self._stale[layer] |= fresh
            fresh.clear()


class LowestScore:
    """Eviction rule: evict the page of the expert with the lowest average router score (HybriMoE's minus recent score).

    The policy passes the scores of a layer's experts to `scored`, which updates moving averages. HybriMoE (Zhong et al.
    2025, arXiv 2504.05897) averages only scores of each token's likeliest experts, more than are chosen; here all
    experts have scores, see `Plan.request_scores`. Pages without a score, such as dense ones, are evicted first.

    weight: weight of new scores in the average, above 0 and up to 1. The paper's value is not known to us.

    Raises:
        BadInput: the weight is out of range.
    """

    def __init__(self, weight: float = 0.3) -> None:
        if not 0 < weight <= 1:
            raise BadInput(f"weight is {weight}: give a number above 0, up to 1")
        self._weight = weight
        self._scores: dict[int, list[float]] = {}

    def used(self, page: Page, step: int, tokens: int) -> None:
        """Do nothing, since this rule ranks pages by score only."""

    def scored(self, layer: int, scores: Sequence[float]) -> None:
        averages = self._scores.get(layer) or [0.0] * len(scores)
        self._scores[layer] = [
            before + self._weight * (score - before) for before, score in zip(averages, scores, strict=True)
        ]

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return min(pages.values(), key=self._rank)

    def _rank(self, page: Page) -> tuple[float, int]:
        scores = self._scores.get(page.layer)
        return scores[page.expert] if scores and page.expert >= 0 else 0.0, page.id
