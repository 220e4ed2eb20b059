"""Simulation of an eviction rule in a small cache of experts: counts hits while routers choose experts at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from random import Random
from types import MappingProxyType

from moesched.dispatch.cached_experts import TakesPreviews, TakesScores
from moesched.models.layout import Page
from moesched.steps.eviction import Eviction

LAYERS, EXPERTS, CHOSEN, STEPS, SEQUENCES = 3, 8, 2, 40, 8
ROOM = LAYERS * CHOSEN
"""Pages in the cache: as many as a step uses."""
PAGES = [
    [Page(layer * EXPERTS + expert, layer, expert, 0, (), 10) for expert in range(EXPERTS)]
    for layer in range(LAYERS)
]

Layer = Mapping[int, int]
"""Number of tokens of each expert that a layer's router chose, by the expert's index."""
Choices = Callable[[Random], Iterator[list[Layer]]]
"""Function that takes a random generator, and yields for each step a list with a `Layer` for every layer."""


def popular(random: Random) -> Iterator[list[Layer]]:
    """Yield a list of `Layer` for each step, chosen at random; each layer prefers the same experts in all steps."""
    ranks = [random.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
    for _ in range(STEPS):
        yield [
            _layer(random, _drawn(random, set(), [1 / (1 + rank) ** 2 for rank in each])) for each in ranks
        ]


def recurring(random: Random) -> Iterator[list[Layer]]:
    """Yield a list of `Layer` for each step, chosen at random; each layer often repeats its last experts."""
    before: list[set[int]] = [set() for _ in range(LAYERS)]
    for _ in range(STEPS):
        stay = [{expert for expert in each if random.random() < 0.8} for each in before]
        before = [_drawn(random, each, [1.0] * EXPERTS) for each in stay]
        yield [_layer(random, each) for each in before]


class _Randomly:
    """An eviction rule that evicts a random page."""

    def __init__(self) -> None:
        self._random = Random(1)

    def used(self, page: Page, step: int, tokens: int) -> None:
        """Ignore the use of a page, since the rule evicts at random."""

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return self._random.choice(list(pages.values()))


def hit_rate(make: Callable[[], Eviction], choices: Choices, *, ahead: bool) -> float:
    """Return the hit rate of an eviction rule: the share (0 to 1) of experts' uses that find the expert in the cache.

    The result is the mean over several random sequences of steps, each simulated with a new rule.

    Args:
        make: creates the rule.
        choices: makes random choices of experts, step by step, such as `popular`.
        ahead: whether to fetch the experts of the next layer before it is reached.
    """
    caches = [_Cache(make()) for _ in range(SEQUENCES)]
    for seed, each in enumerate(caches):
        for step, layers in enumerate(choices(Random(seed))):
            for number, layer in enumerate(layers):
                following = layers[number + 1] if number + 1 < LAYERS else {}
                each.tell(number, layer, following)
                each.run(step, number, layer)
                if ahead:
                    each.fetch(step, number + 1, following)
    return sum(each.hits for each in caches) / (SEQUENCES * STEPS * LAYERS * CHOSEN)


@cache
def random_hit_rate(choices: Choices, *, ahead: bool) -> float:
    """Return the hit rate of a rule that evicts random pages; for the arguments, see `hit_rate`."""
    return hit_rate(_Randomly, choices, ahead=ahead)


class _Cache:
    """A simulated cache of experts; each expert has one page. A layer's experts that are in the cache run first.

    Args:
        rule: chooses the pages to evict.

    Attributes:
        hits: number of uses that found their page in the cache.
    """

    def __init__(self, rule: Eviction) -> None:
        self._rule = rule
        self._held: dict[int, Page] = {}
        self.hits = 0

    def tell(self, number: int, layer: Layer, following: Layer) -> None:
        """Give the rule a layer's router scores and a preview of the next layer, if the rule has methods for them.

        Args:
            number: index of the layer.
            layer: number of tokens of each chosen expert; an expert's score is its share of their sum.
            following: number of tokens of each chosen expert of the next layer; empty after the last layer.
        """
        if isinstance(self._rule, TakesScores):
            tokens = sum(layer.values())
            self._rule.scored(number, [layer.get(expert, 0) / tokens for expert in range(EXPERTS)])
        if isinstance(self._rule, TakesPreviews) and following:
            self._rule.previewed(number + 1, following)

    def run(self, step: int, number: int, layer: Layer) -> None:
        """Use the chosen experts of a layer: count hits, and fetch the experts that are not in the cache."""
        pages = PAGES[number]
        for expert in sorted(layer, key=lambda expert: pages[expert].id not in self._held):
            page = pages[expert]
            self.hits += page.id in self._held
            self.fetch(step, number, [expert])
            self._rule.used(page, step, layer[expert])

    def fetch(self, step: int, number: int, experts: Iterable[int]) -> None:
        """Put the experts that the cache lacks into it; if it is full, the rule chooses a page to evict."""
        for page in (PAGES[number][expert] for expert in experts):
            if page.id in self._held:
                continue
            if len(self._held) == ROOM:
                del self._held[self._rule.choose(MappingProxyType(self._held)).id]
            self._held[page.id] = page
            self._rule.used(page, step, 0)


def _drawn(random: Random, chosen: set[int], weights: list[float]) -> set[int]:
    """Add random experts to `chosen` until the set has as many experts as a layer chooses; return the set.

    weights: relative probability of each expert.
    """
    while len(chosen) < CHOSEN:
        chosen.update(random.choices(range(EXPERTS), weights))
    return chosen


def _layer(random: Random, experts: set[int]) -> Layer:
    return {expert: random.randint(1, 9) for expert in sorted(experts)}
