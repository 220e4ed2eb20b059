"""Estimates the slowdown of tasks by other tasks, from tasks that were timed alone and beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

LEAST_OVERLAP = 0.3
"""A task counts if it ran beside others for at least this share of its time."""
LEAST_RATE = 0.05
MOST_TIMES_SLOWER = 3.0
"""Tasks whose slowdown is more than this many times the median of their class do not count.

Such tasks lost their core to another thread, for up to 4 ms where attention takes 0.1 ms, whatever ran beside them.
"""
PRIOR_SECONDS = 0.005
"""Strength of the regularisation, as seconds of observation.

Least squares cannot separate mixes that were seen only briefly, or always in the same proportions. The regularisation
draws the rates of such mixes to the rate of all mixes together.
"""


class Observed(NamedTuple):
    """One task's times in seconds.

    Attributes:
        alone: the task's time alone.
        took: the task's time beside others.
        beside: seconds of `took` in which other tasks ran, by mix. A mix names the classes of work of the tasks that
            ran at once, joined by " + ".
    """

    alone: float
    took: float
    beside: Mapping[str, float]


def rates_beside(tasks: Sequence[Observed]) -> dict[str, float]:
    """Return the speeds of tasks of one class beside other tasks, relative to running alone, by mix of the other tasks.

    A task that ran b seconds beside one mix gives an equation: took - b + b * speed = alone (see `Observed`). If there
    were several mixes, b and b * speed are sums over the mixes. The speeds solve the equations of all tasks by least
    squares (ridge regression). Each equation is weighted by 1 / b. With a single mix, the predicted times then add up
    to the measured ones.

    Speeds are from `LEAST_RATE` to 1. Tasks that ran mostly alone do not count. Nor do tasks that took far longer than
    usual: each of them probably shared its core with another thread.
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
