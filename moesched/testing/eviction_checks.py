"""The conformance suite of eviction rules: random uses and arrivals of pages, and counts of hits in a small cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from moesched.dispatch.cached_experts import TakesPreviews, TakesScores
from moesched.models.layout import Page
from moesched.steps.eviction import Eviction
from moesched.testing.asserts import require_asserts
from moesched.testing.cache_hits import Choices, hit_rate, popular, random_hit_rate, recurring

LAYERS, EXPERTS = 3, 5


def check_eviction(make: Callable[[], Eviction], *, rounds: int = 25) -> None:
    """Check that an eviction rule chooses from the pages that it is given, always decides alike, and gets enough hits.

    Pages of dense weights and of experts come, are used and leave at random. Some leave although the rule did not
    choose them, some come back at once after it chose them, and sometimes there is only one page. A rule that has
    methods for router scores and previews is given random ones.

    Then the hits in a small cache are counted. With popular experts that are fetched a layer ahead, the rule has to get
    95 % as many hits as random evictions; with experts that recur from step to step, 60 % as many. A rule with fewer
    hits evicts pages that are about to be used.

    Args:
        make: creates the rule, once per sequence.
        rounds: number of random sequences.

    Raises:
        AssertionError: the rule chose a page that it was not given, decided otherwise when a sequence was repeated, or
            got too few hits.
        Exception: the rule raised it, such as on an attempt to change the mapping of pages, which is read-only.
    """
    require_asserts("check_eviction")
    for seed in range(rounds):
        first, second = _choices(make(), seed), _choices(make(), seed)
        assert first == second, f"seed {seed}: the same uses gave other choices the second time"
    _require_hits(make, "popular experts that are fetched a layer ahead", popular, least=0.95, ahead=True)
    _require_hits(make, "experts that recur from step to step", recurring, least=0.6)


def _require_hits(
    make: Callable[[], Eviction], experts: str, choices: Choices, *, least: float, ahead: bool = False
) -> None:
    """Check that a rule's hit rate is at least `least` times the hit rate of random evictions.

    Args:
        make: creates the rule.
        experts: the chosen experts in words, for the error message.
        choices: makes random choices of experts, step by step, such as `popular`.
        ahead: whether experts of the next layer are fetched before it is reached.
    """
    found, at_random = hit_rate(make, choices, ahead=ahead), random_hit_rate(choices, ahead=ahead)
    assert found >= least * at_random, (
        f"of {experts}, {found:.0%} are in a cache of this rule and {at_random:.0%} in one that evicts at random: "
        "the rule evicts pages that are about to be used"
    )


def _choices(rule: Eviction, seed: int) -> list[int]:
    """Give a rule random uses of pages, drawn from `seed`; return the ids of the pages that it evicts, in order."""
    random = Random(seed)
    pages = [
        Page(number, number // (EXPERTS + 1), number % (EXPERTS + 1) - 1, 0, (), 10)
        for number in range(LAYERS * (EXPERTS + 1))
    ]
    room = random.randint(1, len(pages) - 1)
    held: dict[int, Page] = {}
    named = []
    for page in random.sample(pages, random.randint(0, room)):
        _come(rule, held, page, -1)
    for step in range(random.randint(1, 12)):
        for page in sorted(random.sample(pages, random.randint(1, len(pages))), key=lambda page: page.layer):
            _tell_experts(rule, page.layer, random)
            if page.id not in held:
                if len(held) == room:
                    named.append(_named(rule, held))
                    del held[named[-1]]
                _come(rule, held, page, step)
            for _ in range(random.randint(0, 2)):
                rule.used(page, step, random.randint(1, 50))
            if held and random.random() < 0.1:
                del held[random.choice(sorted(held))]
    return named


def _come(rule: Eviction, held: dict[int, Page], page: Page, step: int) -> None:
    held[page.id] = page
    rule.used(page, step, 0)


def _tell_experts(rule: Eviction, layer: int, random: Random) -> None:
    """Give a rule random scores and a random preview of a layer's experts, if the rule has methods for them."""
    experts = random.sample(range(EXPERTS), random.randint(0, EXPERTS))
    if isinstance(rule, TakesScores) and random.random() < 0.5:
        rule.scored(layer, [random.random() if expert in experts else 0.0 for expert in range(EXPERTS)])
    if isinstance(rule, TakesPreviews) and random.random() < 0.5:
        rule.previewed(layer, {expert: random.randint(1, 9) for expert in experts})


def _named(rule: Eviction, held: Mapping[int, Page]) -> int:
    page: object = rule.choose(MappingProxyType(held))
    assert isinstance(page, Page), f"choose gave {page!r}: return a page"
    assert held.get(page.id) == page, f"choose named page #{page.id}, which is none of {sorted(held)}"
    return page.id
