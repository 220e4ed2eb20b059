"""Eviction rules, for `plan.pool(..., replacement=rule)` and for `CachedExperts`.

A rule has a method `used`, called at each use of a page, and a method `choose`, which returns the page to evict.
Each cache needs a rule object of its own. Among equal candidates a rule evicts the page that comes first in the model,
so that equal runs evict equal pages.
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
    """Eviction rule: evict the least recently used page.

    The string "lru" as a pool's replacement does the same, but faster.
    """

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
    """Base of eviction rules that rank pages: the page with the lowest rank is evicted.

    If several pages have the lowest rank, the one that comes first in the model is evicted. Ranks are kept in a heap,
    so that choosing is fast in a large cache. A page's rank may rise at any time; after ranks fell, a subclass calls
    `rank_all`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Page]] = []
        """(rank, id, page) of each page that came. Ranks may be outdated; evicted pages are removed at the top only."""
        self._in_heap: set[int] = set()

    @abstractmethod
    def rank(self, page: Page) -> tuple[int, ...]:
        """Return the page's rank, a tuple of integers of fixed length; the page with the lowest is evicted first."""

    @abstractmethod
    def used(self, page: Page, step: int, tokens: int) -> None:
        """Record that a page was used by `tokens` tokens in a step.

        A page that enters the cache is recorded with 0 tokens; the method then has to call `add`.
        """

    def add(self, page: Page) -> None:
        """Add a page that enters the cache to the pages that may be evicted."""
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
        """Compute the ranks of all pages anew; subclasses call this method after ranks fell."""
        self._heap = [(self.rank(page), number, page) for _, number, page in self._heap]
        heapify(self._heap)


class LeastFrequentlyUsed(LowestRank):
    """Eviction rule: evict the page that the fewest tokens have used since the start of the run.

    Uses count whether or not the page was in the cache.
    """

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
    """Eviction rule: evict the page whose last use was in the earliest step.

    Among pages last used in the same step, the one that the fewest tokens have used is evicted. Plain LRU would evict
    the pages of the next layers: layers run in a fixed order, so these pages have not been used for the longest time.
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
    """Eviction rule: evict the page of the lowest frequency class; within a class, the least recently used page.

    A page's use count is the number of steps that used the page. Its class is the largest power of two that is not
    above the use count, so that small differences do not matter. Every `half_life` steps all use counts are halved, so
    that pages that were popular long ago can be evicted.

    Modelled on the expert cache proposed for llama.cpp (pull request 24524 and its forks), which halves its counts
    every 512 decode steps and does not cache an expert at its first use; here the policy decides which experts to
    fetch. The pull request says "frequency classes"; that these are powers of two is our reading.

    half_life: number of steps after which all use counts are halved.

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

    Layers run in a fixed order, so recency says little: the least recently used page may belong to the next layer. A
    page is stale if the current step has neither used nor fetched the page. Pages are evicted in this order:

        1. stale pages of layers before the current one, the first layer first: this step no longer needs them;
        2. stale pages of the current and later layers, the last layer first;
        3. other pages of layers before the current one, the first layer first;
        4. other pages of the current and later layers, such as prefetched ones, the last layer first.

    The two criteria, staleness and the layer's position, are those of the paper's abstract and of accounts of the paper
    by others. The order within the four groups is our reading.
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
    """Eviction rule: evict the page of the expert whose average router score is the lowest.

    The policy passes the router scores of a layer's experts to `scored`, which updates a moving average for each
    expert. An average starts at the expert's first score, usually a mean over the tokens of prompts. Each later
    score enters the average with the share `weight`, and the old average with the rest.

    HybriMoE (Zhong et al. 2025, arXiv 2504.05897) averages only the scores of the likeliest experts of each
    token; here all experts have scores (see `Plan.request_scores`). Pages without a score, such as dense ones, are
    evicted first.

    weight: weight of a new score in the moving average, above 0 and up to 1. The paper's value is not known to us.

    Raises:
        BadInput: the weight is out of range.
    """

    def __init__(self, weight: float = 0.1) -> None:
        if not 0 < weight <= 1:
            raise BadInput(f"weight is {weight}: give a number above 0, up to 1")
        self._weight = weight
        self._scores: dict[int, list[float]] = {}

    def used(self, page: Page, step: int, tokens: int) -> None:
        """Do nothing, since this rule ranks pages by score only."""

    def scored(self, layer: int, scores: Sequence[float]) -> None:
        averages = self._scores.get(layer, scores)
        self._scores[layer] = [
            before + self._weight * (score - before) for before, score in zip(averages, scores, strict=True)
        ]

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return min(pages.values(), key=self._rank)

    def _rank(self, page: Page) -> tuple[float, int]:
        scores = self._scores.get(page.layer)
        return scores[page.expert] if scores and page.expert >= 0 else 0.0, page.id
