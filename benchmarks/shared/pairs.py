"""A figure now beside the same figure before, from rounds in which both were measured in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from statistics import median
from typing import Any, NamedTuple, TypeVar

RESAMPLES = 2000
ROUNDS_PER_START = 5
"""Rounds after which both are started anew: where a process has its code and data in memory, and what it ran before,
makes it some percent faster or slower for its whole life."""

S = TypeVar("S")
T = TypeVar("T")
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


def in_turns(
    measure: Callable[[S, str], T], before: S, now: S, names: Collection[str], rounds: range
) -> dict[str, list[tuple[T, T]]]:
    """By name, what `measure` gave before and now in the rounds of one start, after a round that does not count.

    The one that goes first changes from round to round.
    """
    found: dict[str, list[tuple[T, T]]] = {name: [] for name in names}
    for number in [rounds.start, *rounds]:
        order = (before, now) if number % 2 else (now, before)
        for name in names:
            first, second = (measure(each, name) for each in order)
            found[name].append((first, second) if number % 2 else (second, first))
    return {name: pairs[1:] for name, pairs in found.items()}


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


def compared_rows(pairs: Mapping[str, Sequence[Pairs]]) -> dict[str, Any]:
    """Each row's comparison, for a result file; printed, too."""
    rows = {row: compared(starts) for row, starts in pairs.items()}
    for row, figure in rows.items():
        low, high = figure.interval
        print(f"{row:60} {figure.ratio:.3f}  ({low:.3f} to {high:.3f})")
    return {row: figure._asdict() for row, figure in rows.items()}
