"""The gain from each resource: the bound of a plan on machines that have a tenth more of one resource."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.planner.candidate import Candidate
from moesched.planner.setting import Setting

MORE = 1.1


class Gain(msgspec.Struct, frozen=True):
    """A resource, and the relative increase of throughput from a tenth more of it."""

    resource: str
    share: float


def gains(candidate: Candidate) -> list[Gain]:
    """The gains of a candidate's bound, the most useful first."""
    now = candidate.bound_with(candidate.setting)
    found = [
        Gain(resource, max(0.0, candidate.bound_with(setting) / now - 1))
        for resource, setting in _richer(candidate.setting)
    ]
    return sorted(found, key=lambda gain: gain.share, reverse=True)


def _richer(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Copies of the setting, each with more of one resource.

    For a calibrated machine only capacities vary, since its measured costs are not valid for other hardware.
    """
    machine = setting.machine
    for name in machine.memories:
        if name != machine.roles.pinned:
            budgets = setting.budgets | {name: int(setting.capacity(name) * MORE)}
            yield f"{name} capacity", replace(setting, budgets=budgets)
    if machine.cost_table:
        return
    for resource, faster in _faster(machine):
        yield resource, replace(setting, machine=faster, cost=cost_model(faster, setting.layout.dtype))


def _faster(machine: Machine) -> Iterator[tuple[str, Machine]]:
    for name in dict.fromkeys((machine.roles.accelerator, machine.roles.host)):
        processor = machine.processors[name]
        flops = {dtype: rate * MORE for dtype, rate in processor.flops.items()}
        changed = machine.processors | {name: replace(processor, flops=flops)}
        yield f"{name} FLOP/s", replace(machine, processors=changed)
        tier = machine.memories[processor.memory]
        memories = machine.memories | {processor.memory: replace(tier, bandwidth=tier.bandwidth * MORE)}
        yield f"{processor.memory} bandwidth", replace(machine, memories=memories)
    for lane in dict.fromkeys(link.lane for link in machine.links):
        links = [
            replace(link, bandwidth=link.bandwidth * MORE) if link.lane == lane else link
            for link in machine.links
        ]
        yield f"{lane} bandwidth", replace(machine, links=links)
