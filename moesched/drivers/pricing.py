"""What the virtual drivers share: the time that work takes alone, and a pause of the garbage collector."""

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
    """A schedule is many small lists and no cycles: looking for garbage among them only costs time.

    What was made meanwhile counts as old afterwards, or the next look at what is young would go through all of it.
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
