"""Searches for a policy that would be much faster than a given one, by a few simulations of each promising policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from moesched import plugins
from moesched.drivers.pricing import no_garbage_collection
from moesched.errors import BadInput
from moesched.planner.candidate import Candidate
from moesched.planner.schedules import Schedule
from moesched.planner.search_policies import plannable
from moesched.planner.setting import Setting, splits_kv

MUCH = 1.25
"""A policy is much faster than another one if its rate is higher by more than this factor."""
MOST_TRIALS = 3
"""Number of policies whose schedules are simulated: those with the highest bounds."""
SIZES = (64, 256)
"""Requests of a micro-batch in the first looks."""
MOST_TASKS = 30_000
"""Largest number of tasks in a trial run of all layers; policies whose run would have more are left out."""


class Rival(NamedTuple):
    """A policy much faster than a given one, and its schedule: all layers simulated, batch sizes chosen roughly."""

    policy: str
    schedule: Schedule


def faster_policy(setting: Setting, policy: str, rate: float) -> Rival | None:
    """Find a shipped policy that is much faster than `policy`; None if none is found.

    Policies are tried in the order of their speed in a simulation of a few layers, the fastest first.

    Args:
        setting: the setting of `policy`, with the prompt lengths of the batch.
        rate: generated tokens per second of `policy`, prefill included.
    """
    with no_garbage_collection():
        promising = [each for each in _candidates(setting, policy) if each.choice.throughput > MUCH * rate]
        promising.sort(key=lambda each: -each.choice.throughput)
        trials = []
        for candidate in promising[:MOST_TRIALS]:
            with suppress(BadInput):
                trials.append((candidate, candidate.first_trial()))
        for candidate, few in sorted(trials, key=lambda trial: -trial[1].throughput):
            if few.throughput > MUCH * rate and few.tasks_of_all_layers <= MOST_TASKS:
                with suppress(BadInput):
                    schedule = candidate.schedules.deepened(few)
                    if schedule.throughput > MUCH * rate:
                        return Rival(candidate.name, schedule)
    return None


def _candidates(setting: Setting, policy: str) -> Iterator[Candidate]:
    """Yield a candidate for each shipped policy that fits, other than `policy`."""
    sizes = [size for size in SIZES if size <= len(setting.lengths)] or [len(setting.lengths)]
    shipped = plugins.shipped_policies()
    for name in plannable():
        if name != policy and name in shipped:
            cls = plugins.find("policies", name)
            theirs = replace(setting, make=cls, splits_kv=splits_kv(cls, setting.machine), kv_on_gpu=None)
            with suppress(BadInput):
                yield Candidate(name, theirs, sizes)
