"""Estimates how far the speed of each kind of work varied around its median during a calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles

from moesched.calibration.task_times import rounded
from moesched.machines.estimates import Estimate

LEAST = 1.05
"""The smallest factor of the spread in either direction, even if measurements varied less."""
FEW, FEWEST = 8, 1.15
"""With fewer than FEW measurements, the smallest factor of the spread is FEWEST."""
TENTHS = 10


def spread(speeds: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Estimate the range of each kind of work's speed, relative to its median speed.

    The expected value is 1. The range reaches from the first to the last decile of `speeds`, and at least from
    1 / `LEAST` to `LEAST`. With fewer than `FEW` measurements it reaches at least from 1 / `FEWEST` to `FEWEST`.

    Args:
        speeds: measured speeds by kind of work, each relative to the median speed of equal tasks.
    """
    return {kind: _estimate(found) for kind, found in sorted(speeds.items()) if found}


def _estimate(speeds: Sequence[float]) -> Estimate:
    least = FEWEST if len(speeds) < FEW else LEAST
    cuts = quantiles(speeds, n=TENTHS, method="inclusive") if len(speeds) > 1 else [1.0]
    low, high = min(cuts[0], 1 / least), max(cuts[-1], least)
    return Estimate(low=rounded(low), expected=1.0, high=rounded(high), source=f"{len(speeds)} measurements")
