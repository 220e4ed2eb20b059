"""The choice of a dilation by a rehearsal: the least with which real work takes at most a share of each lane's time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import WeightLayout
from moesched.seams import CostModel, Dilations, Progress
from moesched.steps.plan import Plan

from .rehearsal import Rehearsed, rehearse

LANE_SHARE = 1 / 4
"""Largest share of a lane's dilated time that real work may take in a rehearsal, where no other lane is busy."""

OPERATION_SHARE = 1 / 2
"""Largest share of the dilated time of one kind of operation that its real work may take in a rehearsal."""

NEGLIGIBLE = 1 / 200
"""Share of a lane's time by which operations together may exceed OPERATION_SHARE; some take only microseconds."""


def choose_dilations(
    checkpoint: Checkpoint, layout: WeightLayout, plan: Plan, cost: CostModel, tell: Progress
) -> Dilations:
    """Find how far to slow down prefill and decode of a plan, so that this machine does the work in time.

    A rehearsal measures the work. The dilations (real seconds for each emulated second) are proportional to the number
    of ranks, which share the cores of this machine.

    Args:
        checkpoint, layout: the model's files, and the division of its weights into pages.
        cost: the cost model of the emulated machine.
        tell: is called with the progress of the rehearsal.
    """
    rehearsed, ranks = rehearse(checkpoint, layout, plan, cost, tell), layout.config.ranks
    return Dilations(
        ranks * least_dilation(rehearsed["prefill"]), ranks * least_dilation(rehearsed["decode"])
    )


def least_dilation(rehearsed: Sequence[Rehearsed]) -> float:
    """Find the least dilation with which real work takes no more than its allowed share of each lane's time.

    The result is rounded up to one of four values for each power of two: 1, 1.25, 1.5, 1.75, 2, 2.5 and so on.

    rehearsed: the seconds of real work, and on the emulated machine, of each kind of operation on each lane.
    """
    lanes: dict[str, list[Rehearsed]] = {}
    for each in rehearsed:
        lanes.setdefault(each.lane, []).append(each)
    dilations = ((4 + number % 4) / 4 * 2.0 ** (number // 4) for number in count())
    return next(each for each in dilations if all(_keeps_up(lane, each) for lane in lanes.values()))


def _keeps_up(lane: Sequence[Rehearsed], dilation: float) -> bool:
    modelled = sum(each.modelled for each in lane)
    real = sum(each.real for each in lane) / dilation
    beyond = sum(max(0.0, each.real / dilation - OPERATION_SHARE * each.modelled) for each in lane)
    return real <= LANE_SHARE * modelled and beyond <= NEGLIGIBLE * modelled
