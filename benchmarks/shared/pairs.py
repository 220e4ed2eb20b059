"""A figure now beside the same figure before, from rounds in which both were measured in turn."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median
from typing import NamedTuple

RESAMPLES = 2000
ROUNDS_PER_START = 5
"""Rounds after which both are started anew: where a process has its code and data in memory, and what it ran before,
makes it some percent faster or slower for its whole life."""

Pairs = list[tuple[float, float]]
"""A figure before and now, in the rounds of one start."""


class Comparison(NamedTuple):
    """The medians of a figure, the median of the paired ratios (now / before), and its interval."""

    before: float
    after: float
    ratio: float
    interval: tuple[float, float]


def starts_of(rounds: int) -> list[range]:
    """The numbers of the rounds of each start."""
    firsts = range(0, rounds, ROUNDS_PER_START)
    return [range(first, min(first + ROUNDS_PER_START, rounds)) for first in firsts]


def compared(starts: Sequence[Pairs]) -> Comparison:
    """Compare a figure before and now; the interval of 95 % draws starts, then rounds of each."""
    random = Random(0)
    ratios = [[after / before for before, after in pairs] for pairs in starts]
    medians = sorted(
        median(
            ratio
            for drawn in random.choices(ratios, k=len(ratios))
            for ratio in random.choices(drawn, k=len(drawn))
        )
        for _ in range(RESAMPLES)
    )
    low, high = (round(medians[int(RESAMPLES * share)], 4) for share in (0.025, 0.975))
    return Comparison(
        median(before for pairs in starts for before, _ in pairs),
        median(after for pairs in starts for _, after in pairs),
        round(median(ratio for each in ratios for ratio in each), 4),
        (low, high),
    )
