"""How much tasks slow each other down, from tasks that were measured alone and beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LEAST_OVERLAP = 0.3
"""How much of a task must have been beside others for it to tell anything."""
LEAST_RATE = 0.05
PRIOR_SECONDS = 0.005
"""How much observation it takes to tell a mix's rate from that of all mixes together: mixes that were hardly seen, or
come in the same proportions in every task, would else be given what another one is robbed of."""


class Observed(NamedTuple):
    """One task; seconds.

    Attributes:
        alone: what it takes alone.
        took: what it took.
        beside: for how long of that others ran, by what ran at once.
    """

    alone: float
    took: float
    beside: Mapping[str, float]


def rates_beside(tasks: Sequence[Observed]) -> dict[str, float]:
    """How fast tasks of one sort go on beside others, relative to being alone, by what runs at once; at most 1.

    Of a task that took d, what takes a alone, while others ran for o of it, d - o + o * rate = a; with several mixes
    of others a sum over these. The rates are those of least squares (ridge regression), each task weighed by the
    inverse of o: for a single mix they bring the tasks' times to the right sum, which is what a lane's busy time is.
    """
    overlapping = [each for each in tasks if sum(each.beside.values()) > LEAST_OVERLAP * each.took]
    if not overlapping:
        return {}
    mixes = sorted({mix for each in overlapping for mix in each.beside})
    beside = np.array([[each.beside.get(mix, 0.0) for mix in mixes] for each in overlapping])
    overlap = beside.sum(axis=1)
    left = np.array([each.alone - each.took for each in overlapping]) + overlap
    weights = 1 / np.sqrt(overlap)
    prior = np.sqrt(PRIOR_SECONDS) * np.eye(len(mixes))
    of_all = left.sum() / overlap.sum()
    sides = np.concatenate([left * weights, prior.sum(axis=1) * of_all])
    rates = np.linalg.lstsq(np.vstack([beside * weights[:, None], prior]), sides, rcond=None)[0]
    return {mix: min(1.0, max(LEAST_RATE, float(rate))) for mix, rate in zip(mixes, rates, strict=True)}
