"""Helpers of the virtual drivers: the time that work takes alone, and a pause of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from moesched.seams import CostModel
from moesched.tasks import Work


def nanoseconds(work: Work, cost: CostModel) -> int:
    """The time of a work alone, at least one nanosecond, so that time moves on; asked of the cost model once."""
    if work.nanoseconds < 0:
        work.demand = cost.work(work)
        work.nanoseconds = max(1, round(work.demand.seconds * 1e9))
        work.lead = min(round(work.demand.lead * 1e9), work.nanoseconds - 1)
    return work.nanoseconds


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector: a schedule is many small objects without cycles, so that collections only cost time.

    Objects made meanwhile count as old afterwards; otherwise the next young collection would visit all of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
