"""Eviction rules: the page that each names, what pools tell them, and errors of rules that err."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import pytest

from meddling import CASE, Everything, refused
from moesched.dispatch import (
    CachedExperts,
    FrequencyClasses,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastRecentStep,
    LeastStale,
    LowestScore,
)
from moesched.errors import PolicyError
from moesched.machines.staging import staged
from moesched.models.layout import Page
from moesched.seams import Eviction
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.testing import check_eviction, run_on_symbols
from page_bench import PAGES, Bench

RULES: list[Callable[[], Eviction]] = [
    LeastRecentlyUsed,
    LeastFrequentlyUsed,
    LeastRecentStep,
    FrequencyClasses,
    lambda: FrequencyClasses(half_life=2),
    LeastStale,
    LowestScore,
]
HERE = str(Path(__file__))
OTHER = CASE.layout().pages[0]
FOREIGN = msgspec.structs.replace(CASE.layout().pages[-2], nbytes=1)
"""A page of another model, with the id of one that is in the pool."""


class Told:
    """Writes down what it is told, and evicts the page that came first."""

    def __init__(self) -> None:
        self.uses: list[tuple[int, int, int]] = []
        self.offered: list[list[int]] = []

    def used(self, page: Page, step: int, tokens: int) -> None:
        self.uses.append((page.id, step, tokens))

    def choose(self, pages: Mapping[int, Page]) -> Page:
        self.offered.append(list(pages))
        return next(iter(pages.values()))


class Names(Told):
    """Names whatever it was made with."""

    def __init__(self, named: object) -> None:
        super().__init__()
        self.named = named

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return self.named  # type: ignore[return-value]  # a rule that errs


# -- pools -----------------------------------------------------------------------------------------


def test_a_rule_is_told_of_arrivals_and_uses_and_names_the_page_that_goes() -> None:
    rule = Told()
    bench = Bench(slots=2, replacement=rule)
    bench.fetch(0)
    bench.fetch(1)
    bench.read(0)
    bench.fetch(2)
    assert rule.uses == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (2, 0, 0)]
    assert rule.offered == [[0, 1]]
    assert bench.held() == [1, 2]
    bench.check()


def test_a_fetch_does_not_replace_its_own_pages() -> None:
    rule = Told()
    bench = Bench(slots=2, replacement=rule)
    bench.fetch(0)
    bench.fetch(1, 2)
    assert rule.offered == [[0]]
    bench.fetch(3, 4)
    assert rule.offered[1:] == [[1, 2], [2]]
    bench.evict(3)
    bench.fetch(0)
    bench.fetch(1)
    assert rule.offered[3:] == [[4, 0]], "what a policy evicted is no longer offered"
    bench.check()


def test_a_rule_cannot_change_the_pages_that_it_is_given() -> None:
    class Removes(Told):
        def choose(self, pages: Mapping[int, Page]) -> Page:
            return pages.pop(0)  # type: ignore[attr-defined, no-any-return]  # a mapping for reading only

    bench = Bench(slots=1, replacement=Removes())
    bench.fetch(0)
    with pytest.raises(PolicyError, match=r"Removes failed in `choose` for page L0 E1 #0 .*AttributeError"):
        bench.fetch(1)


@pytest.mark.parametrize("seed", range(20))
def test_the_rule_lru_evicts_the_same_pages_as_the_pools_own(seed: int) -> None:
    def held(replacement: Literal["lru"] | Eviction) -> list[list[int]]:
        random, states = Random(seed), []
        bench = Bench(slots=3, replacement=replacement)
        for _ in range(40):
            missing = [page.id for page in PAGES if page not in bench.pool]
            present = sorted(bench.held())
            if present and random.random() < 0.5:
                bench.read(random.choice(present))
            else:
                bench.fetch(*random.sample(missing, random.randint(1, 2)))
            states.append(sorted(bench.held()))
        bench.check()
        return states

    assert held(LeastRecentlyUsed()) == held("lru")


def test_reads_of_dense_pages_and_copies_to_another_pool_are_uses() -> None:
    class Streams(Everything):
        def plan(self, plan: Plan) -> None:
            pages = plan.layout.pages
            plan.place_kv("accelerator")
            plan.keep([page for page in pages if page.expert >= 0])
            self.dense = [page for page in pages if page.expert < 0]
            self.rule, self.staged = Told(), Told()
            self.staging = plan.pool("pinned", "staging", len(self.dense), self.dense, self.staged)
            self.pool = plan.pool("accelerator", "dense", len(self.dense), self.dense, self.rule)

        async def prefill(self, step: Step) -> None:
            if not step.index:
                step.copy_to_pinned(self.dense, self.staging)
                step.fetch(self.dense, self.pool, source=self.staging)
            await super().prefill(step)

        decode = prefill

    policy = Streams()
    case = msgspec.structs.replace(CASE, machine=staged(CASE.machine, "16GB"))
    run_on_symbols(policy, case.plan(policy))
    first = policy.dense[0].id
    uses = [use for use in policy.rule.uses if use[0] == first and use[1] < 2]
    # It comes; then attention and the router read it, for 2 micro-batches of 8 and 6 tokens, and of 2 tokens.
    assert uses == [(first, 0, 0), *[(first, 0, 8)] * 2, *[(first, 0, 6)] * 2, *[(first, 1, 2)] * 4]
    assert policy.staged.uses == [(page.id, 0, 0) for page in policy.dense * 2], "they come, and are copied"


# -- rules that err --------------------------------------------------------------------------------


class Evicts(Everything):
    """Streams the last expert of the model through one slot, which a rule empties."""

    def __init__(self, rule: object) -> None:
        self.rule = rule

    def plan(self, plan: Plan) -> None:
        pages = plan.layout.pages
        plan.place_kv("accelerator")
        plan.keep(pages[:-2])
        self.last = pages[-2:]
        self.pool = plan.pool("accelerator", "last", 1, self.last, self.rule, self.last[:1])  # type: ignore[arg-type]

    async def run_experts(self, step: Step, i: int, j: int) -> None:
        for expert in await step.route(i, j):
            for page in step.expert_pages(i, expert):
                if page in self.last and page not in self.pool:
                    step.fetch([page], self.pool)
            step.run_expert(i, expert, j)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (None, "named None, which is no page"),
        (3, "named 3, which is no page"),
        (OTHER, "named page L0 dense #0, which is not in pool last"),
        (CASE.layout().pages[-1], "named page L2 E3 #0, which comes with this very fetch"),
        (FOREIGN, "named page L2 E2 #0, which is not in pool last"),
    ],
    ids=["nothing", "a number", "a page elsewhere", "a page that comes", "a page of another model"],
)
def test_a_rule_that_names_none_of_the_pages_is_told_with_its_line(named: object, says: str) -> None:
    said = str(refused(Evicts(Names(named))))
    assert said.startswith(
        f"pool last: eviction rule Names {says} for page L2 E3 #0: return one of the pages"
    )
    line = Names.choose.__code__.co_firstlineno
    assert said.endswith(f"({HERE}:{line})")


@pytest.mark.parametrize("method", ["used", "choose"])
def test_an_error_in_a_rule_names_the_rule_the_page_and_its_line(method: str) -> None:
    def fail(*_: object) -> Page:
        raise KeyError("no\nsuch thing")

    def used(self: Told, page: Page, step: int, tokens: int) -> None:
        if step >= 0:
            fail()

    kind = type("Fails", (Told,), {method: used if method == "used" else fail})
    said = refused(Evicts(kind()))
    line = fail.__code__.co_firstlineno + 1
    failed = rf"eviction rule Fails failed in `{method}` for page L2 E[23] #0 at "
    assert re.match(f"pool last: {failed}", str(said))
    assert str(said).endswith(rf"{HERE}:{line}: KeyError: 'no\nsuch thing'")
    assert isinstance(said.__cause__, KeyError)
    assert "\n" not in str(said)
    if method == "used":
        cache = CachedExperts(CASE.layout(), kind(), room=1)
        with pytest.raises(PolicyError, match=r"Fails failed in `used` for page L1 E3 #0 at .*KeyError"):
            cache.hits(1, {3: 2}, step=0)


def test_a_fetch_whose_arrival_a_rule_refuses_leaves_no_page_behind() -> None:
    class Refuses(Told):
        def used(self, page: Page, step: int, tokens: int) -> None:
            if page.id == 1:
                raise ValueError

    bench = Bench(slots=2, replacement=Refuses())
    with pytest.raises(PolicyError):
        bench.fetch(0, 1)
    assert bench.held() == []
    bench.check()


class Rigid:
    """A rule without a place for weak references."""

    __slots__ = ()

    def used(self, page: Page, step: int, tokens: int) -> None:
        """It forgets."""

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return next(iter(pages.values()))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (range, "eviction rule range cannot be made (TypeError: range expected at least 1 argument, got 0): give an"),
        (object(), "is no rule of replacement: give 'ring', 'lru', 'none', or a class or object with"),
        (None, "None is no rule of replacement"),
        (Rigid(), "runs cannot tell eviction rules of class Rigid apart: add '__weakref__' to its slots"),
    ],
    ids=["a class of what needs arguments", "another object", "nothing", "slots"],
)  # fmt: skip
def test_what_is_no_rule_is_refused_where_the_pool_is_declared(rule: object, says: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(says)):
        CASE.plan(Evicts(rule))


def test_a_rule_orders_one_pool_of_one_run() -> None:
    rule = Told()
    CASE.plan(Evicts(rule))
    with pytest.raises(
        PolicyError, match="Told orders another cache, of this run or an earlier one: make a new"
    ):
        CASE.plan(Evicts(rule))
    policy = Evicts(Told)  # a class makes one for each pool
    for _ in range(2):
        ended = run_on_symbols(policy, CASE.plan(policy))
        assert ended.tokens == ended.expected
    with pytest.raises(PolicyError, match="the cache of experts: eviction rule Told orders another cache"):
        CachedExperts(CASE.layout(), rule, room=1)


# -- the rules of the kit --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*RULES, Told])
def test_a_rule_conforms_and_gives_the_tokens_of_the_model(make: Callable[[], Eviction]) -> None:
    """Those of the kit, and one that knows nothing of what comes."""
    check_eviction(make)
    policy = Evicts(make())
    ended = run_on_symbols(policy, CASE.plan(policy))
    assert ended.tokens == ended.expected


@pytest.mark.parametrize(
    ("named", "says"),
    [(None, "choose gave None: return a page"), (OTHER, "choose named page #0, which is none of")],
)
def test_the_conformance_suite_finds_a_rule_that_names_another_page(named: object, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_eviction(lambda: Names(named))


def test_the_conformance_suite_finds_a_rule_that_does_not_repeat_itself() -> None:
    random = Random(1)

    class Draws(Told):
        def choose(self, pages: Mapping[int, Page]) -> Page:
            return random.choice(list(pages.values()))

    with pytest.raises(AssertionError, match="seed 0: the same uses gave other choices the second time"):
        check_eviction(Draws)


class NextToBeUsed(Told):
    """Names the page that a step comes to next: of the layer after the one that was used last."""

    def choose(self, pages: Mapping[int, Page]) -> Page:
        number, _, _ = next((use for use in reversed(self.uses) if use[2]), (0, 0, 0))
        return min(pages.values(), key=lambda page: (page.id - number - 1) % 100)


class LastUsed(Told):
    """Names the page that was used or came last."""

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return next(pages[number] for number, _, _ in reversed(self.uses) if number in pages)


class LastArrived(Told):
    """Names the page that came last, perhaps for the next layer."""

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return list(pages.values())[-1]


class NotYetUsed(Told):
    """Names a page that was fetched ahead and that nothing has read."""

    def choose(self, pages: Mapping[int, Page]) -> Page:
        last = {number: tokens for number, _, tokens in self.uses}
        return next((page for page in pages.values() if not last[page.id]), next(iter(pages.values())))


class MostUsed(Told):
    """Names the page that most tokens used."""

    def choose(self, pages: Mapping[int, Page]) -> Page:
        return max(pages.values(), key=lambda page: sum(use[2] for use in self.uses if use[0] == page.id))


class Forecast(Told):
    """Names a page that is forecast for the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.experts = -1, frozenset[int]()

    def previewed(self, layer: int, tokens: Mapping[int, int]) -> None:
        self.layer, self.experts = layer, frozenset(tokens)

    def choose(self, pages: Mapping[int, Page]) -> Page:
        foretold = (
            each for each in pages.values() if each.layer == self.layer and each.expert in self.experts
        )
        return next(foretold, next(iter(pages.values())))


@pytest.mark.parametrize("make", [NextToBeUsed, LastUsed, LastArrived, NotYetUsed, MostUsed, Forecast])
def test_the_conformance_suite_finds_a_rule_that_evicts_what_is_about_to_be_used(make: type[Told]) -> None:
    with pytest.raises(AssertionError, match="the rule evicts pages that are about to be used"):
        check_eviction(make, rounds=1)


# -- caches of experts -----------------------------------------------------------------------------


def test_a_cache_of_experts_tells_its_rule_of_all_chosen_experts_by_their_first_pages() -> None:
    rule, layout = Told(), CASE.layout()
    cache = CachedExperts(layout, rule, room=2, held=[(0, 1)])
    assert cache.hits(0, {2: 5, 1: 3}, step=4) == [1]
    first = [layout.expert(0, expert)[0].id for expert in range(3)]
    assert rule.uses == [(first[1], -1, 0), (first[1], 4, 3), (first[2], 4, 5)]
    assert cache.enter((0, 2), step=4) is None
    assert cache.enter((1, 0), step=4) == (0, 1)
    assert [(0, 1) in cache, (0, 2) in cache, (1, 0) in cache, len(cache)] == [False, True, True, 2]
    assert CachedExperts(layout, Told(), room=0).enter((1, 2), step=0) == (1, 2), "without room"


def test_a_cache_hands_scores_and_previews_to_rules_that_take_them() -> None:
    class Takes(Told):
        def scored(self, layer: int, scores: Sequence[float]) -> None:
            self.heard = layer, list(scores)

        def previewed(self, layer: int, tokens: Mapping[int, int]) -> None:
            self.foretold = layer, dict(tokens)

    rule = Takes()
    for each in (rule, Told()):
        cache = CachedExperts(CASE.layout(), each, room=1)
        cache.scored(1, [0.5, 0.2, 0.3, 0.0])
        cache.previewed(2, {3: 7})
    assert (rule.heard, rule.foretold) == ((1, [0.5, 0.2, 0.3, 0.0]), (2, {3: 7}))
