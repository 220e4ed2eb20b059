"""The choice of a dilation by a rehearsal: the least one with which real work fits into a share of each lane's time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import WeightLayout
from moesched.seams import CostModel, Dilations, Progress
from moesched.steps.plan import Plan

from .rehearsal import Rehearsed, rehearse

LANE_SHARE = 1 / 4
"""Largest share of a lane's dilated time that real work may take in a rehearsal, in which no other lane is busy."""

OPERATION_SHARE = 1 / 2
"""Largest share of its dilated time that the real work of one kind of operation may take in a rehearsal."""

NEGLIGIBLE = 1 / 200
"""Share of a lane's time by which its operations, added up, may exceed OPERATION_SHARE, as some take microseconds."""


def choose_dilations(
    checkpoint: Checkpoint, layout: WeightLayout, plan: Plan, cost: CostModel, tell: Progress
) -> Dilations:
    """Choose dilations (real seconds for each emulated second) for the prefill and the decode of a plan.

    A rehearsal runs operations of the plan on this machine and measures their real time. From these times
    `least_dilation` finds the dilations for one rank. They are multiplied by the number of ranks, since all ranks share
    this machine's cores.

    Args:
        checkpoint: the model's files.
        layout: the division of the model's weights into pages.
        cost: the cost model of the emulated machine.
        tell: is called with the progress of the rehearsal.
    """
    rehearsed, ranks = rehearse(checkpoint, layout, plan, cost, tell), layout.config.ranks
    return Dilations(
        ranks * least_dilation(rehearsed["prefill"]), ranks * least_dilation(rehearsed["decode"])
    )


def least_dilation(rehearsed: Sequence[Rehearsed]) -> float:
    """Find the least dilation with which real work takes no more than a quarter (LANE_SHARE) of each lane's time.

    As a second limit, the real work of each kind of operation should take no more than half (OPERATION_SHARE) of that
    operation's dilated time. The excess over these halves, added up over a lane's operations, may be up to 1/200
    (NEGLIGIBLE) of the lane's time. The result is rounded up to the next of the values 1, 1.25, 1.5, 1.75, 2, 2.5, 3,
    3.5, 4, 5, 6, 7, 8, 10 and so on.

    rehearsed: for each kind of operation on each lane, its seconds of real work and those on the emulated machine.
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
