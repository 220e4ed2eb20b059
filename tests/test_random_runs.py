"""Random graphs, programs and policies: whatever runs beside whatever, the values are those of the program's order."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.robustness._random_graph import run_graph
from benchmarks.robustness._random_policy import run_policy
from benchmarks.robustness._random_program import Shape
from benchmarks.shared.within import within

RANKS = st.integers(1, 3)
SEEDS = st.integers(0, 10**9)


@pytest.mark.parametrize("troubled", [False, True], ids=["sound", "with failures and cancellations"])
@settings(max_examples=30)
@given(st.randoms(use_true_random=False), RANKS)
def test_on_the_virtual_clock_every_value_is_that_of_the_program_order(
    troubled: bool, choose: Random, ranks: int
) -> None:
    verdict = run_graph(choose, Shape(real=False, ranks=ranks, troubled=troubled))
    assert not verdict.problems
    assert troubled or verdict.failed == verdict.cancelled == 0


@pytest.mark.parametrize("troubled", [False, True], ids=["sound", "with failures and interruptions"])
@settings(max_examples=100)
@given(SEEDS, RANKS)
def test_on_threads_every_value_is_that_of_the_program_order(troubled: bool, seed: int, ranks: int) -> None:
    verdict = within(60, lambda: run_graph(Random(seed), Shape(real=True, ranks=ranks, troubled=troubled)))
    assert not verdict.problems
    assert troubled or verdict.failed == verdict.cancelled == 0


@pytest.mark.parametrize("troubled", [False, True])
@pytest.mark.parametrize("real", [False, True])
def test_policies_on_random_models_come_to_the_right_tokens_or_to_the_failure(
    real: bool, troubled: bool
) -> None:
    for seed in range(15):
        assert not within(60, lambda: run_policy(Random(seed), Shape(real, 1, troubled))).problems  # noqa: B023
