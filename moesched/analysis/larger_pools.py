"""A run with more room in a pool: what its caches would still hold is not fetched, and transfers wait less for room.

The pool's rules are played again with the accesses that the trace has. In a ring pages stay longer, but whatever the
policy fetched is fetched still. The policy's decisions are held: experts that ran on the host run there still.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moesched.analysis.pool_replay import Outcome, outcomes_with_more_room, ring_outcomes
from moesched.trace.recording import PoolAccesses, Recording
from moesched.trace.waits import lacked_room


def with_larger_pool(recording: Recording, accesses: PoolAccesses, factor: float) -> Recording:
    """Change the room of a pool.

    Args:
        accesses: of that pool, one of the recording's.
        factor: of its room, from 1 on.

    Raises:
        BadInput: the pool's rule cannot be played again.
    """
    slices = recording.slices
    transfers = {
        each.id: index
        for index, each in enumerate(slices)
        if each.task.pool == accesses.pool and each.lane.rank == accesses.rank
    }
    if accesses.accesses:
        outcomes = outcomes_with_more_room(accesses, factor)
    else:
        pages = {number: slices[index].task.pages for number, index in sorted(transfers.items())}
        outcomes = ring_outcomes(round(accesses.slots * factor), pages)
    return _changed(recording, transfers, outcomes)


def _changed(
    recording: Recording, transfers: Mapping[int, int], outcomes: Mapping[int, Outcome]
) -> Recording:
    """The recording without spared transfers, and with the other transfers' new waits for room.

    transfers: the indices of the pool's transfers, by id.
    """
    slices = recording.slices
    producers = [list(each) for each in recording.producers]
    readers = _readers(recording, set(transfers.values()))
    spared = set()
    for number, index in sorted(transfers.items()):
        outcome = outcomes.get(number)
        if outcome is None:
            continue
        earlier = [transfers[each] for each in outcome.transfers if each in transfers]
        if outcome.spared:
            spared.add(index)
            for reader in readers[index]:
                producers[reader] += [each for each in earlier if each not in producers[reader]]
            for each in earlier:
                readers[each] += readers[index]
        else:
            users = {user for each in earlier for user in (each, *readers[each])}
            kept = [each for each in producers[index] if not lacked_room(slices[each], slices[index])]
            waits = [each for each in sorted(users) if slices[each].id < number and each not in kept]
            producers[index] = kept + waits
    return _without(recording, producers, spared)


def _readers(recording: Recording, transfers: set[int]) -> dict[int, list[int]]:
    """The slices that read what each transfer brought."""
    readers: dict[int, list[int]] = {each: [] for each in transfers}
    slices = recording.slices
    for index, producers in enumerate(recording.producers):
        for each in producers:
            if each in transfers and not lacked_room(slices[each], slices[index]):
                readers[each].append(index)
    return readers


def _without(recording: Recording, producers: list[list[int]], spared: set[int]) -> Recording:
    """The recording without some slices."""
    kept = [index for index in range(len(producers)) if index not in spared]
    places = {index: place for place, index in enumerate(kept)}
    return msgspec.structs.replace(
        recording,
        slices=[recording.slices[index] for index in kept],
        producers=[tuple(places[each] for each in producers[index] if each in places) for index in kept],
    )
