"""Helpers of the virtual drivers: the time that work takes alone, and a pause of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from moesched.machines.demand import CostModel
from moesched.tasks import Work


def nanoseconds(work: Work, cost: CostModel) -> int:
    """Return the nanoseconds of a work alone, at least 1, so that time moves on; the result is kept in the work."""
    if work.nanoseconds < 0:
        work.demand = cost.work(work)
        work.nanoseconds = max(1, round(work.demand.seconds * 1e9))
        work.lead = min(round(work.demand.lead * 1e9), work.nanoseconds - 1)
    return work.nanoseconds


MANY = 20_000
"""If a run made at least this number of objects, objects are moved to the collector's oldest generation."""

FULL = 5_000_000
"""After this number of objects moved to the oldest generation, all garbage is collected."""

_made_old = 0

_frozen_by_others = False
"""True if other code froze objects, which must stay frozen; determined once, since counting them takes long."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector within this context: schedules are many small objects without cycles.

    Afterwards, many new objects are moved to the collector's oldest generation; otherwise the next young collection
    would visit all of them. This resets the collector's counts, so full collections are made here from time to time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            made = gc.get_count()[0]
            if made >= MANY and not _others_froze():
                gc.freeze()
                gc.unfreeze()
                _collect_in_time(made)
            gc.enable()


def _others_froze() -> bool:
    global _frozen_by_others
    _frozen_by_others = _frozen_by_others or gc.get_freeze_count() > 0
    return _frozen_by_others


def _collect_in_time(made: int) -> None:
    """Collect all garbage if, with the `made` new ones, enough objects were made since the last time."""
    global _made_old
    _made_old += made
    if _made_old >= FULL:
        _made_old = 0
        gc.collect()
