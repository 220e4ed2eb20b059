"""Helpers of virtual drivers: the duration of a task that runs alone, and a pause of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from moesched.machines.cost_model import CostModel
from moesched.work import Work


def nanoseconds(work: Work, cost: CostModel) -> int:
    """Return the nanoseconds that a task with this `Work` takes if it runs alone; at least 1, so that time moves on.

    The first call stores the result in `work.nanoseconds`. It also sets `work.demand`, the time and the resources that
    the task needs, and `work.lead`, the part of the time in which the task is handed to its lane's thread. Later calls
    return the stored result.
    """
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
    """Pause Python's garbage collector within this context, as a schedule makes many small objects that form no cycles.

    At the end of the context the new objects, if they are many, move to the collector's oldest generation, so that the
    next collection of young objects does not visit them. Since this resets the collector's counts, the context also
    makes a full collection from time to time.
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
    """Count `made` new objects; collect all garbage once enough were made since the last full collection."""
    global _made_old
    _made_old += made
    if _made_old >= FULL:
        _made_old = 0
        gc.collect()
