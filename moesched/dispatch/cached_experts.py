"""Bookkeeping of a cache of experts whose evictions a rule decides."""

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
    """An eviction rule that takes router scores from the policy."""

    def scored(self, layer: int, scores: Sequence[float]) -> None:
        """Record the scores of all experts of a layer, such as those of an awaited `route`."""


@runtime_checkable
class TakesPreviews(Protocol):
    """An eviction rule that takes forecasts of experts from the policy."""

    def previewed(self, layer: int, tokens: Mapping[int, int]) -> None:
        """Record, for each expert of a layer, the number of tokens that are forecast to choose it."""


class CachedExperts:
    """The set of experts in a cache; an eviction rule names the next one to leave. An `ExpertPool` has their slots.

    The rule sees each expert as its first page. Every chosen expert counts as used, in the cache or not and wherever it
    runs: once per layer and step, with the tokens of all micro-batches.

    Args:
        rule: the eviction rule; no other cache may use this object.
        room: the most experts in the cache.
        held: experts that are in the cache before the first step.

    Raises:
        PolicyError: the object is no eviction rule, or belongs to another cache.
    """

    def __init__(
        self, layout: WeightLayout, rule: Eviction | type[Eviction], room: int, held: Iterable[Expert] = ()
    ) -> None:
        self._ruled = RuledPages(rule, "the cache of experts", room)
        self._rule = self._ruled.rule
        self._first = _FirstPages(layout)
        self._here: defaultdict[int, set[int]] = defaultdict(set)
        """Indices of the experts in the cache, by layer."""
        for expert in held:
            self.enter(expert, -1)

    def __len__(self) -> int:
        return len(self._ruled.held)

    def __contains__(self, expert: Expert) -> bool:
        return expert[1] in self._here[expert[0]]

    def hits(self, layer: int, chosen: Mapping[int, int], step: int) -> list[int]:
        """Report a layer's chosen experts to the rule; return those that are in the cache, in ascending order.

        chosen: number of tokens by expert.
        step: number of the step; never lower than in an earlier call.
        """
        self._ruled.use_all(self._first[layer], chosen, step)
        return sorted(chosen.keys() & self._here[layer])

    def enter(self, expert: Expert, step: int) -> Expert | None:
        """Add an expert to the cache; return the expert that leaves it, or None if there was room.

        The rule may choose the added expert itself to leave.

        Raises:
            PolicyError: the rule failed, or named a page that is no expert's in the cache.
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
        """Remove an expert from the cache, without asking the rule."""
        layer, number = expert
        self._ruled.leave(self._first[layer][number])
        self._here[layer].discard(number)

    def scored(self, layer: int, scores: Sequence[float]) -> None:
        """Pass the router scores of a layer's experts to the rule, if it takes scores."""
        if isinstance(self._rule, TakesScores):
            self._rule.scored(layer, scores)

    def previewed(self, layer: int, tokens: Mapping[int, int]) -> None:
        """Pass the forecast number of tokens of each expert of a layer to the rule, if it takes forecasts."""
        if isinstance(self._rule, TakesPreviews):
            self._rule.previewed(layer, tokens)


class _FirstPages(dict[int, list[Page]]):
    """The first page of each expert, by layer; a layer is looked up when it is first used."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout

    def __missing__(self, layer: int) -> list[Page]:
        layout = self._layout
        pages = self[layer] = [layout.expert(layer, each)[0] for each in layout.experts_of(layer)]
        return pages
