"""The spread of a calibration: how far the speed of each kind of work was from its median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles

from moesched.calibration.task_times import rounded
from moesched.machines.estimates import Estimate

LEAST = 1.05
"""Factor by which a kind of work may always be slower or faster, however even its measurements were."""
FEW, FEWEST = 8, 1.15
"""With fewer measurements than this, the factor that it may be slower or faster at least."""
TENTHS = 10


def spread(speeds: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Estimates of each kind's speed, from the lowest to the highest tenth of those measured.

    Args:
        speeds: relative to the median of the same task, by kind of work.
    """
    return {kind: _estimate(found) for kind, found in sorted(speeds.items()) if found}


def _estimate(speeds: Sequence[float]) -> Estimate:
    least = FEWEST if len(speeds) < FEW else LEAST
    cuts = quantiles(speeds, n=TENTHS, method="inclusive") if len(speeds) > 1 else [1.0]
    low, high = min(cuts[0], 1 / least), max(cuts[-1], least)
    return Estimate(low=rounded(low), expected=1.0, high=rounded(high), source=f"{len(speeds)} measurements")
