"""The experts of a cache that a policy keeps, ordered by an eviction rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from moesched.dispatch.expert_placement import Expert
from moesched.models.layout import Page, WeightLayout
from moesched.steps.eviction import RuledPages
from moesched.steps.eviction_rule import Eviction


@runtime_checkable
class TakesScores(Protocol):
    """An eviction rule that a policy tells of router scores."""

    def scored(self, layer: int, scores: Sequence[float]) -> None:
        """Take note of the scores of all experts of a layer, such as those of an awaited `route`."""


@runtime_checkable
class TakesPreviews(Protocol):
    """An eviction rule that a policy tells of forecasts."""

    def previewed(self, layer: int, tokens: Mapping[int, int]) -> None:
        """Take note of the number of tokens that are forecast to choose each expert of a layer."""


class CachedExperts:
    """Whole experts in a cache, of which a rule names the next to go; an `ExpertPool` has their slots.

    The rule sees each expert as its first page. Every chosen expert is reported to it, whether it is in the cache or
    not, and wherever it runs; by all tokens of a layer at once.

    Args:
        rule: belongs to this cache from here on.
        room: number of experts.
        held: experts that are in the cache before the first step.

    Raises:
        PolicyError: the rule is none, or belongs to another cache.
    """

    def __init__(
        self, layout: WeightLayout, rule: Eviction | type[Eviction], room: int, held: Iterable[Expert] = ()
    ) -> None:
        self._ruled = RuledPages(rule, "the cache of experts", room)
        self._rule = self._ruled.rule
        self._first = _FirstPages(layout)
        self._here: defaultdict[int, set[int]] = defaultdict(set)
        """The experts in the cache, by layer."""
        for expert in held:
            self.enter(expert, -1)

    def __len__(self) -> int:
        return len(self._ruled.held)

    def __contains__(self, expert: Expert) -> bool:
        return expert[1] in self._here[expert[0]]

    def hits(self, layer: int, chosen: Mapping[int, int], step: int) -> list[int]:
        """Tell the rule of a layer's chosen experts; returns those that are in the cache, in ascending order.

        chosen: number of tokens by expert. Steps never go back.
        """
        self._ruled.use_all(self._first[layer], chosen, step)
        return sorted(chosen.keys() & self._here[layer])

    def enter(self, expert: Expert, step: int) -> Expert | None:
        """Add an expert to the cache; returns the one that leaves it, if there is no room for both.

        The one that leaves may be the one that was added.

        Raises:
            PolicyError: the rule failed, or named another page than one of the cache's experts.
        """
        layer, number = expert
        ruled = self._ruled
        ruled.enter(self._first[layer][number], step)
        self._here[layer].add(number)
        if len(ruled.held) <= ruled.room:
            return None
        page = ruled.next_to_go()
        del ruled.held[page.id]
        self._here[page.layer].discard(page.expert)
        return page.layer, page.expert

    def remove(self, expert: Expert) -> None:
        """Take an expert out of the cache, without asking the rule."""
        layer, number = expert
        self._ruled.leave(self._first[layer][number])
        self._here[layer].discard(number)

    def scored(self, layer: int, scores: Sequence[float]) -> None:
        """Tell the rule the router scores of a layer's experts, if it takes them."""
        if isinstance(self._rule, TakesScores):
            self._rule.scored(layer, scores)

    def previewed(self, layer: int, tokens: Mapping[int, int]) -> None:
        """Tell the rule the forecast tokens of a layer's experts, if it takes them."""
        if isinstance(self._rule, TakesPreviews):
            self._rule.previewed(layer, tokens)


class _FirstPages(dict[int, list[Page]]):
    """By layer, the first page of each expert; of the layers that were asked for."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout

    def __missing__(self, layer: int) -> list[Page]:
        layout = self._layout
        pages = self[layer] = [layout.expert(layer, each)[0] for each in layout.experts_of(layer)]
        return pages
