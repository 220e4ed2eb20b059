"""Computes how much faster a plan would be with a tenth more of one resource, for each resource in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.planner.candidate import Candidate
from moesched.planner.objectives import rate
from moesched.planner.schedules import Schedule, with_chunk
from moesched.planner.setting import Setting
from moesched.planner.trial_run import MOST_STEPS, trial_run

MORE = 1.1
IDLE = 0.02
"""With one request, resources of lanes that are busy for less than this share of the time are left out."""


class Gain(msgspec.Struct, frozen=True):
    """The gain from a tenth more of a resource.

    Attributes:
        resource: name of the resource, such as "pcie bandwidth".
        share: relative increase of the bound on throughput, or of the rate of one request; 0.05 is 5 %.
    """

    resource: str
    share: float


def gains(candidate: Candidate, schedule: Schedule) -> list[Gain]:
    """Return the relative gain from a tenth more of each resource, the largest first.

    A gain is an increase of the candidate's bound on throughput. If the plan is for one request, it is an increase of
    the rate in a trial run. The list is empty if the bound does not hold for the policy.
    """
    setting = candidate.setting
    rate_with = candidate.bound_with if setting.objective == "throughput" else _trials(setting, schedule)
    now = rate_with(setting)
    if not now:  # the bound does not hold for a policy that chooses places by what is free
        return []
    found = [
        Gain(resource, max(0.0, rate_with(richer) / now - 1))
        for resource, richer in _richer(setting, schedule)
    ]
    return sorted(found, key=lambda gain: gain.share, reverse=True)


def _trials(setting: Setting, schedule: Schedule) -> Callable[[Setting], float]:
    """Return a function from a setting to the rate that a trial run of this schedule reaches in that setting."""

    def rate_with(richer: Setting) -> float:
        if schedule.few is not None:
            trial, batch = schedule.few.on(richer).trial(MOST_STEPS), schedule.few.batch
        else:
            cut = with_chunk(richer, schedule.chunk)
            batch = cut.batch(1, 1)
            share = schedule.kv_on_gpu if setting.splits_kv else None
            plan, policy = cut.plan(batch, kv_on_gpu=share)
            trial = trial_run(plan, policy)
        return rate(setting.objective, trial, batch)

    return rate_with


def _richer(setting: Setting, schedule: Schedule) -> Iterator[tuple[str, Setting]]:
    """Yield each resource once, with a setting whose machine has a tenth more of the resource.

    Resources are capacities of memories, and rates of lanes. Rates are left out if the machine's costs were measured,
    since measured costs hold for one machine only. If the plan is for one request, rates of idle lanes are left out.
    """
    machine = setting.machine
    for name in machine.memories:
        if name != machine.roles.pinned:
            budgets = setting.budgets | {name: int(setting.capacity(name) * MORE)}
            yield f"{name} capacity", replace(setting, budgets=budgets)
    if machine.cost_table:
        return
    given = set[str]()
    for lane, resource, faster in _faster(machine):
        idle = setting.objective != "throughput" and schedule.trial_run.utilization.get(lane, 1.0) < IDLE
        if not idle and resource not in given:  # two processors may share one memory
            given.add(resource)
            yield resource, replace(setting, machine=faster, cost=cost_model(faster, setting.layout.dtype))


def _faster(machine: Machine) -> Iterator[tuple[str, str, Machine]]:
    """Yield a faster machine for each resource of each lane.

    Yields:
        Triples: the lane's name, which for a processor is its role, "host" or "accelerator"; the name of the resource;
        the faster machine.
    """
    roles = {machine.roles.host: "host", machine.roles.accelerator: "accelerator"}
    for name, role in sorted(roles.items(), key=lambda each: each[1]):
        processor = machine.processors[name]
        flops = {dtype: rate * MORE for dtype, rate in processor.flops.items()}
        changed = machine.processors | {name: replace(processor, flops=flops)}
        yield role, f"{name} FLOP/s", replace(machine, processors=changed)
        tier = machine.memories[processor.memory]
        memories = machine.memories | {processor.memory: replace(tier, bandwidth=tier.bandwidth * MORE)}
        yield role, f"{processor.memory} bandwidth", replace(machine, memories=memories)
    for lane in dict.fromkeys(link.lane for link in machine.links):
        links = [
            replace(link, bandwidth=link.bandwidth * MORE) if link.lane == lane else link
            for link in machine.links
        ]
        yield lane, f"{lane} bandwidth", replace(machine, links=links)
