"""Finds fetches that a pool with twice the slots would not need, since it would still hold the fetched experts."""

from __future__ import annotations

from itertools import islice
from typing import TypeAlias

from moesched.trace.recording import Recording, Slice

Key: TypeAlias = tuple[int, int]
"""The rank and the number of a task."""


def key_of(each: Slice) -> Key:
    """Return (rank, task id) of a recorded task: a key which does not change if a recording is cut."""
    return each.lane.rank, each.id


def returning_pages(recording: Recording) -> frozenset[Key]:
    """Return the keys of the fetches that an LRU pool of experts with twice the slots would not need.

    An expert is used when a task computes with it, and when it is fetched.
    """
    found: list[Key] = []
    by_rank: dict[int, dict[Key, None]] = {}
    for each in sorted((each for each in recording.slices if each.task.expert >= 0), key=key_of):
        task, used = each.task, by_rank.setdefault(each.lane.rank, {})
        expert = task.layer, task.expert
        if task.pool_slots and task.pages and expert in used:
            kept = islice(reversed(used), 2 * task.pool_slots // task.pages)
            if expert in kept:
                found.append(key_of(each))
        used.pop(expert, None)
        used[expert] = None
    return frozenset(found)
