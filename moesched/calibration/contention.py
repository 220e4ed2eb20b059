"""Estimates how much tasks slow each other down, from tasks that were timed alone and beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

LEAST_OVERLAP = 0.3
"""Smallest share of its time that a task must run beside others to count."""
LEAST_RATE = 0.05
MOST_TIMES_SLOWER = 3.0
"""A task that is slowed by this many times the median of its sort lost its core for a time slice of the system: up to
4 ms for attention of 0.1 ms. How often depends on the process's threads at that moment, not on the tasks beside."""
PRIOR_SECONDS = 0.005
"""The observation time that a mix of tasks needs for a rate of its own. Rates of mixes that were seen for less, or
always in the same proportions, are drawn to the rate of all mixes together; least squares could not tell them apart."""


class Observed(NamedTuple):
    """One task's times in seconds.

    Attributes:
        alone: its time alone.
        took: its time beside others.
        beside: the part of `took` during which others ran, by the mix of tasks that ran at once.
    """

    alone: float
    took: float
    beside: Mapping[str, float]


def rates_beside(tasks: Sequence[Observed]) -> dict[str, float]:
    """Speeds of tasks of one sort beside others, relative to running alone, by the mix of tasks beside; at most 1.

    A task that takes a alone, and took d while others ran for o of it, satisfies d - o + o * rate = a; with several
    mixes, a sum over them. The rates solve this by least squares (ridge regression), each task weighted by 1 / o: for
    a single mix, the tasks' predicted times then have the measured sum, as a lane's busy time is a sum. Tasks that lost
    their core do not count.
    """
    overlapping = [each for each in tasks if sum(each.beside.values()) > LEAST_OVERLAP * each.took]
    if not overlapping:
        return {}
    mixes = sorted({mix for each in overlapping for mix in each.beside})
    usual = median(each.took / each.alone for each in overlapping)
    overlapping = [each for each in overlapping if each.took <= MOST_TIMES_SLOWER * usual * each.alone]
    beside = np.array([[each.beside.get(mix, 0.0) for mix in mixes] for each in overlapping])
    overlap = beside.sum(axis=1)
    left = np.array([each.alone - each.took for each in overlapping]) + overlap
    weights = 1 / np.sqrt(overlap)
    prior = np.sqrt(PRIOR_SECONDS) * np.eye(len(mixes))
    of_all = left.sum() / overlap.sum()
    sides = np.concatenate([left * weights, prior.sum(axis=1) * of_all])
    rates = np.linalg.lstsq(np.vstack([beside * weights[:, None], prior]), sides, rcond=None)[0]
    return {mix: min(1.0, max(LEAST_RATE, float(rate))) for mix, rate in zip(mixes, rates, strict=True)}
