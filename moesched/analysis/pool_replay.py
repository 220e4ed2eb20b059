"""Replays of a pool's order of replacement with more room, from the accesses that a trace has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from moesched.dispatch.adaptive_replacement import AdaptiveReplacement
from moesched.dispatch.eviction import (
    FrequencyClasses,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastRecentStep,
    LeastStale,
)
from moesched.errors import BadInput
from moesched.models.layout import Page
from moesched.steps.eviction_rule import Eviction
from moesched.trace.recording import LEFT, USED, CacheRule, PoolAccesses

RULES = (
    AdaptiveReplacement,
    FrequencyClasses,
    LeastFrequentlyUsed,
    LeastRecentStep,
    LeastRecentlyUsed,
    LeastStale,
)
"""The rules that depend on accesses alone."""

Unit = tuple[int, int]
"""The unit that a cache adds and removes: an expert, by layer and number, or a page."""


class Outcome(NamedTuple):
    """The part of a transfer in the larger pool.

    Attributes:
        spared: whether its pages are there already.
        transfers: those that brought these pages, or, if it is not spared, the pages that it overwrites. Without pages
            that were there before the first step.
    """

    spared: bool
    transfers: list[int]


def ring_outcomes(slots: int, transfers: Mapping[int, int]) -> dict[int, Outcome]:
    """Fill a ring: each page overwrites the oldest.

    transfers: number of pages by transfer, in program order.
    """
    contents: deque[tuple[int, int]] = deque()
    free = slots
    outcomes = {}
    for transfer, pages in transfers.items():
        overwritten = []
        free -= pages
        while free < 0 and contents:
            before, freed = contents.popleft()
            free += freed
            overwritten.append(before)
            if free > 0:
                contents.appendleft((before, free))
                free = 0
        contents.append((transfer, pages))
        outcomes[transfer] = Outcome(False, overwritten)
    return outcomes


def outcomes_with_more_room(accesses: PoolAccesses, factor: float) -> dict[int, Outcome]:
    """Play a pool's accesses with more room.

    Args:
        factor: of the caches' room, from 1 on; slots beside the caches stay.

    Returns:
        the outcome of each transfer, by id.

    Raises:
        BadInput: the pool's rule, or that of one of its caches, is not one of `RULES`.
    """
    if not accesses.accesses:
        return {}
    replay = CachesReplay if accesses.replacement == "none" else RuledPoolReplay
    return replay(accesses, factor).play()


class _PoolReplay(ABC):
    """A pool with more room, and the caches whose rules order it."""

    def __init__(self, accesses: PoolAccesses, factor: float) -> None:
        caches = accesses.caches or [CacheRule(LeastRecentlyUsed.__name__, accesses.slots)]
        self._accesses = deque(accesses.accesses)
        self._rules = [_rule_of(accesses.pool, cache.rule) for cache in caches]
        self._room_before = [cache.room for cache in caches]
        self._rooms = [round(cache.room * factor) for cache in caches]
        self._pages = {each.id: Page(each.id, each.layer, each.expert, 0, (), 0) for each in accesses.pages}
        self._size = max(Counter(map(self._unit, self._pages)).values(), default=1)
        """Pages of what a cache adds and removes as one."""
        self._held: list[dict[int, Page]] = [{} for _ in caches]
        self._present: dict[Unit, dict[int, int]] = {}
        """The pages that transfers brought and that are still there, by unit, each with its transfer."""
        self._whole: set[Unit] = set()
        """Units that were there before the first step."""
        more = sum(self._rooms) - sum(self._room_before)
        self._new = accesses.slots + more * self._size
        """Number of slots that no transfer has filled yet."""
        self._empty: deque[int] = deque()
        """The transfers that filled the other empty slots last."""
        self._spared: set[Unit] = set()
        self._outcomes: dict[int, Outcome] = {}

    def play(self) -> dict[int, Outcome]:
        """Play all accesses."""
        self._start()
        for access in self._accesses:
            if access[0] == USED:
                self._use(*access[1:])
            elif access[0] == LEFT:
                self._leave(*access[1:])
            else:
                self._bring(access[0], access[1:])
        return self._outcomes

    @abstractmethod
    def _unit(self, page: int) -> Unit:
        """The unit that a cache adds and removes."""

    @abstractmethod
    def _use(self, cache: int, page: int, step: int, tokens: int) -> None:
        """Tell a rule of a use, or of a page that comes."""

    @abstractmethod
    def _leave(self, cache: int, page: int) -> None:
        """The policy drops a page, which it would not have fetched if it had been there already."""

    @abstractmethod
    def _make_room(self) -> None:
        """Empty a slot if the pool itself does so."""

    def _bring(self, transfer: int, pages: tuple[int, ...]) -> None:
        missing = [page for page in pages if not self._is_present(page)]
        there = [page for page in pages if page not in missing]
        found = {self._present.get(self._unit(page), {}).get(page, -1) for page in there}
        self._spared |= {self._unit(page) for page in there}
        for page in missing:
            if not self._new and not self._empty:
                self._make_room()
            found.add(self._slot())
            self._present.setdefault(self._unit(page), {})[page] = transfer
            self._spared.discard(self._unit(page))
        self._outcomes[transfer] = Outcome(not missing, sorted(found - {-1}))

    def _slot(self) -> int:
        """Take an empty slot; returns the transfer that filled it last, or -1."""
        if self._new > 0:
            self._new -= 1
            return -1
        return self._empty.popleft() if self._empty else -1

    def _start(self) -> None:
        """Fill the caches as before the first step; those that were full then are full in the larger pool, too."""
        uses = [access for access in self._accesses if access[0] == USED]
        while self._accesses and self._accesses[0][:1] + self._accesses[0][3:4] == (USED, -1):
            _, cache, page, _, _ = self._accesses.popleft()
            self._fill(cache, page)
        for cache, (held, before) in enumerate(zip(self._held, self._room_before, strict=True)):
            if len(held) == before:
                others = sorted({page for _, owner, page, _, _ in uses if owner == cache} - held.keys())
                for page in others[: self._rooms[cache] - before]:
                    self._fill(cache, page)

    def _fill(self, cache: int, page: int) -> None:
        self._held[cache][page] = self._pages[page]
        self._rules[cache].used(self._pages[page], -1, 0)
        self._whole.add(self._unit(page))
        self._new -= self._size

    def _remove(self, cache: int, page: int) -> None:
        del self._held[cache][page]
        unit = self._unit(page)
        for each in [*self._present.get(unit, ())]:
            self._free(each)
        if unit in self._whole:
            self._whole.remove(unit)
            self._new += self._size

    def _free(self, page: int) -> None:
        """Empty the slot of a page that a transfer brought, if it is there."""
        brought = self._present.get(self._unit(page), {}).pop(page, None)
        if brought is not None:
            self._empty.append(brought)

    def _is_present(self, page: int) -> bool:
        unit = self._unit(page)
        return unit in self._whole or page in self._present.get(unit, {})


class CachesReplay(_PoolReplay):
    """Caches of a policy: they hold whole experts, and make one leave when another is added."""

    def _unit(self, page: int) -> Unit:
        return self._pages[page].layer, self._pages[page].expert

    def _use(self, cache: int, page: int, step: int, tokens: int) -> None:
        held, rule = self._held[cache], self._rules[cache]
        comes = not tokens and page not in held
        if comes:
            held[page] = self._pages[page]
        rule.used(self._pages[page], step, tokens)
        if comes and len(held) > self._rooms[cache]:
            self._remove(cache, rule.choose(held).id)

    def _leave(self, cache: int, page: int) -> None:
        unit = self._unit(page)
        if cache >= 0:
            if page in self._held[cache] and unit not in self._spared:
                self._remove(cache, page)
        # The expert left its cache, or was in none; the larger cache may hold it still.
        elif not any(unit == self._unit(each) for held in self._held for each in held):
            self._free(page)

    def _make_room(self) -> None:
        """The policy does, when it adds an expert to a cache."""


class RuledPoolReplay(_PoolReplay):
    """A pool that has its rule itself, and makes room for each page that comes."""

    def __init__(self, accesses: PoolAccesses, factor: float) -> None:
        super().__init__(accesses, factor)
        self._coming: list[tuple[int, int]] = []
        """Pages with their steps; the rule hears of them once all pages of their transfer have slots."""

    def _unit(self, page: int) -> Unit:
        return page, -1

    def _use(self, cache: int, page: int, step: int, tokens: int) -> None:
        if not tokens and page not in self._held[0]:
            self._coming.append((page, step))
        else:
            self._rules[0].used(self._pages[page], step, tokens)

    def _leave(self, cache: int, page: int) -> None:
        if page in self._held[0] and self._unit(page) not in self._spared:
            self._remove(0, page)

    def _make_room(self) -> None:
        if self._held[0]:
            self._remove(0, self._rules[0].choose(self._held[0]).id)

    def _bring(self, transfer: int, pages: tuple[int, ...]) -> None:
        super()._bring(transfer, pages)
        for page, step in self._coming:
            self._held[0][page] = self._pages[page]
            self._rules[0].used(self._pages[page], step, 0)
        self._coming.clear()


def _rule_of(pool: str, name: str) -> Eviction:
    for rule in RULES:
        if rule.__name__ == name:
            return rule()
    raise BadInput(
        f"pool {pool}: its eviction rule {name} cannot be played again from a trace: simulate a machine with more "
        "memory (--machine-set)"
    )
