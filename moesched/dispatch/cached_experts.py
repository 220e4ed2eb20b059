"""Bookkeeping of a cache of experts; an eviction rule decides which expert leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from moesched.dispatch.expert_placement import Expert
from moesched.models.layout import Page, WeightLayout
from moesched.steps.eviction import Eviction, RuledPages


@runtime_checkable
class TakesScores(Protocol):
    """An eviction rule that accepts router scores from the policy."""

    def scored(self, layer: int, scores: Sequence[float]) -> None:
        """Record the router's scores of all experts of a layer, indexed by expert."""


@runtime_checkable
class TakesPreviews(Protocol):
    """An eviction rule that accepts forecasts of the experts that tokens will choose."""

    def previewed(self, layer: int, tokens: Mapping[int, int]) -> None:
        """Record, for each expert of a layer, the number of tokens that are forecast to choose it."""


class CachedExperts:
    """The set of experts in a cache; an eviction rule decides which expert leaves when the cache is full.

    This class only does the bookkeeping; the memory is an `ExpertPool`. Eviction rules are written for pages: here the
    first page of an expert stands for the whole expert. The rule's method `used` is called for every chosen expert,
    even if it is not in the cache or runs on the host: once per layer and step, with its tokens in all micro-batches.

    Args:
        layout: the pages of the model.
        rule: the eviction rule, or its class; no other cache may use the same object.
        room: the largest number of experts in the cache.
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

        Args:
            chosen: for each chosen expert, the number of tokens that chose the expert.
            step: number of the step; never lower than in an earlier call.
        """
        self._ruled.use_all(self._first[layer], chosen, step)
        return sorted(chosen.keys() & self._here[layer])

    def enter(self, expert: Expert, step: int) -> Expert | None:
        """Add an expert to the cache; return the expert that leaves the cache, or None if there was room.

        The expert that leaves may be the added one.

        step: number of the step.

        Raises:
            PolicyError: the rule failed, or chose a page that is not the first page of an expert in the cache.
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
    """The first page of each expert of a layer, by the layer's number; found when the layer is first looked up."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout

    def __missing__(self, layer: int) -> list[Page]:
        layout = self._layout
        pages = self[layer] = [layout.expert(layer, each)[0] for each in layout.experts_of(layer)]
        return pages
