"""Routing without a router: every token gets its experts, and a seed fixes which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moesched.routing import SeededRouting


@given(experts=st.integers(1, 16), share=st.floats(0, 1), tokens=st.integers(1, 200), seed=st.integers(-9, 9))
def test_every_token_takes_as_many_different_experts_as_it_should(
    experts: int, share: float, tokens: int, seed: int
) -> None:
    top_k = 1 + round(share * (experts - 1))
    chosen = SeededRouting(experts, top_k, seed).choose(0, 1, 2, tokens)
    assert sum(chosen.values()) == tokens * top_k
    assert max(chosen.values()) <= tokens
    assert list(chosen) == sorted(chosen)
    assert set(chosen) <= set(range(experts))


def test_the_choice_depends_on_the_place_and_the_seed_alone() -> None:
    routing = SeededRouting(8, 2, seed=3)
    first = routing.choose(1, 2, 3, 100)
    routing.choose(5, 5, 5, 7)
    assert routing.choose(1, 2, 3, 100) == first
    others = [(0, 2, 3), (1, 0, 3), (1, 2, 0)]
    assert all(routing.choose(*place, 100) != first for place in others)
    assert SeededRouting(8, 2, seed=4).choose(1, 2, 3, 100) != first


def test_experts_are_equally_popular() -> None:
    counts = SeededRouting(8, 2).choose(0, 0, 0, 40_000)
    assert all(abs(count - 10_000) < 500 for count in counts.values())
