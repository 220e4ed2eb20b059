"""The order in which each eviction rule of the kit names its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from moesched.dispatch import (
    FrequencyClasses,
    LeastFrequentlyUsed,
    LeastRecentStep,
    LeastStale,
    LowestRank,
    LowestScore,
)
from moesched.errors import BadInput
from moesched.models.layout import Page
from moesched.seams import Eviction
from page_bench import PAGES


def order(rule: Eviction, pages: Sequence[Page]) -> list[int]:
    """The ids of pages in the order in which a rule evicts them."""
    left = {page.id: page for page in pages}
    gone = []
    while left:
        gone.append(rule.choose(left).id)
        del left[gone[-1]]
    return gone


def come(rule: Eviction, *pages: Page, step: int = -1) -> None:
    """Tell a rule of arrivals."""
    for page in pages:
        rule.used(page, step, 0)


def test_lfu_evicts_the_page_that_the_fewest_tokens_used() -> None:
    rule = LeastFrequentlyUsed()
    come(rule, *PAGES[:4])
    for number, tokens in ((0, 5), (1, 2), (2, 2), (1, 4)):
        rule.used(PAGES[number], number, tokens)
    assert order(rule, PAGES[:4]) == [3, 2, 0, 1]


def test_frequency_classes_are_powers_of_two_and_ordered_by_recency_within() -> None:
    rule = FrequencyClasses(half_life=100)
    come(rule, *PAGES[:4])
    # Numbers of steps: 0 has 3, 1 has 2, 2 has 4, 3 has 1.
    for step, used in enumerate([(1, 2), (0, 2), (0, 2, 3), (2,), (1, 0)]):
        for number in used:
            rule.used(PAGES[number], step, 7)
        rule.used(PAGES[used[0]], step, 7)  # another micro-batch of the step
    assert order(rule, PAGES[:4]) == [3, 0, 1, 2]


def test_frequency_classes_forget_old_popularity_half_by_half_and_rank_all_pages_anew() -> None:
    rule = FrequencyClasses(half_life=8)
    come(rule, *PAGES[:2])
    for step in range(7):
        rule.used(PAGES[0], step, 1)
        if step < 2:
            rule.used(PAGES[1], step, 1)
    assert order(rule, PAGES[:2]) == [1, 0]
    rule.used(PAGES[1], 8, 1)
    rule.used(PAGES[1], 9, 1)
    assert order(rule, PAGES[:2]) == [0, 1], "3 of 7 steps count, as many of the other, which was used since"


@pytest.mark.parametrize(
    "make", [LeastFrequentlyUsed, LeastRecentStep, lambda: FrequencyClasses(half_life=3)]
)
@pytest.mark.parametrize("seed", range(8))
def test_a_rule_of_ranks_names_the_page_of_the_lowest_rank(make: Callable[[], LowestRank], seed: int) -> None:
    random, rule = Random(seed), make()
    held: dict[int, Page] = {}
    for step in range(30):
        for page in random.sample(PAGES, 4):
            if page.id not in held:
                while len(held) > 2:
                    lowest = min(held.values(), key=lambda page: (rule.rank(page), page.id))
                    assert rule.choose(held) is lowest
                    del held[lowest.id]
                held[page.id] = page
                rule.used(page, step, 0)
            if random.random() < 0.7:
                rule.used(page, step, random.randint(1, 5))
            if random.random() < 0.1:
                held.pop(random.randint(0, 5), None)  # the policy evicts it


LAYERED = [Page(number, number // 2, number % 2, 0, (), 10) for number in range(10)]
"""Two experts in each of five layers."""


def test_least_stale_evicts_what_this_step_has_passed_before_what_it_has_yet_to_reach() -> None:
    rule = LeastStale()
    come(rule, *LAYERED)
    for number in (0, 2, 4, 6, 8):
        rule.used(LAYERED[number], 0, 1)
    for number in (0, 2, 4):  # the next step is in layer 2
        rule.used(LAYERED[number], 1, 1)
    rule.used(LAYERED[8], 1, 0)  # prefetched for layer 4
    stale_behind, stale_to_come, behind, here_and_to_come = [1, 3], [9, 6, 7, 5], [0, 2], [8, 4]
    assert order(rule, LAYERED) == stale_behind + stale_to_come + behind + here_and_to_come


def test_the_lowest_score_goes_and_scores_fade() -> None:
    rule = LowestScore(weight=0.5)
    rule.scored(0, [0.9, 0.4, 0.0])
    assert order(rule, LAYERED[:4]) == [2, 3, 1, 0]
    for _ in range(3):
        rule.scored(0, [0.0, 0.4, 0.0])
    assert order(rule, LAYERED[:2]) == [0, 1]


def test_the_average_of_scores_begins_with_those_of_the_prompts() -> None:
    rule = LowestScore(weight=0.1)
    rule.scored(0, [0.4, 0.1])
    rule.scored(0, [0.0, 0.5])
    assert order(rule, LAYERED[:2]) == [1, 0]


def test_settings_of_rules_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadInput, match="half_life is 0: give 1 step or more"):
        FrequencyClasses(half_life=0)
    for weight in (0.0, 1.5, float("nan")):
        with pytest.raises(BadInput, match=r"weight is .*: give a number above 0, up to 1"):
            LowestScore(weight)
