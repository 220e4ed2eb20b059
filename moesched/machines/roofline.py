"""The roofline cost model: estimates the time of work at the rates that a machine's kernels and copies reach."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.errors import BadInput
from moesched.machines.kernel_times import KernelTimes
from moesched.machines.machine import INTERCONNECT, Link, Machine, Processor
from moesched.machines.networks import NETWORK
from moesched.machines.sustained import Levels, copies_of, is_rated, sustained_share, usable_share
from moesched.work import Demand, Work

NO_LEVELS: Levels = {}


class Roofline:
    """Cost model from the rates that kernels and copies reach: work takes the time of its slowest resource.

    If kernels and copies reach the rates that the machine states, this is the roofline (MoE-Lightning, Eqs. 7 and 8).

    Args:
        dtype: dtype that the model computes in.
        levels: by name of a group of rates (see `sustained.groups`): "low" or "high", to use the low or the high
            estimates of the group's rates. Groups that are not named use the expected estimates.
    """

    def __init__(self, machine: Machine, dtype: str, levels: Levels = NO_LEVELS) -> None:
        self.machine = machine
        self.dtype = dtype
        self._levels = levels
        self._kernels: dict[str, KernelTimes] = {}
        self._slowed = slowed_beside(machine)

    def work(self, work: Work) -> Demand:
        """Return the time that `work` takes while nothing else runs, and the share of each resource that it uses.

        Raises:
            BadInput: the machine lacks the work's resource, or the resource's rate for this dtype.
        """
        processor = self.machine.processors.get(work.resource)
        if processor is not None:
            times = self._times(work.resource, processor)(work)
            busy = ((work.resource, times.computing), (processor.memory, times.holding))
            return _demand(times.working, times.fixed, busy)
        for link in self.machine.links:
            if work.resource == f"{link.source}->{link.destination}":
                return self._copy(link, work.nbytes)
        group = self.machine.accelerator_group
        if work.resource == INTERCONNECT and group.interconnect is not None:
            seconds = work.nbytes / (group.interconnect.bandwidth * self._share(INTERCONNECT))
            rounds = 2 * (group.count - 1)  # a ring all-reduce sends the data round twice
            lanes = [(name, seconds) for name in (INTERCONNECT, *group.interconnect.paths)]
            return _demand(seconds, rounds * group.interconnect.latency, lanes)
        network = self.machine.network
        if work.resource == NETWORK and network is not None:
            moving = work.nbytes / (network.bandwidth * self._share(NETWORK))
            alone = _demand(moving, network.latency_seconds, ((NETWORK, moving),))
            lead = self.machine.accelerator.handover_seconds
            return alone._replace(seconds=lead + alone.seconds, lead=lead)
        raise BadInput(
            f"machine {self.machine.name} has no cost for {work.kind} on {work.resource!r}: "
            "describe that resource in its profile"
        )

    def _times(self, name: str, processor: Processor) -> KernelTimes:
        known = self._kernels.get(name)
        if known is None:
            peak = self.machine.peak(name, self.dtype)
            bandwidth = self.machine.memories[processor.memory].bandwidth
            usable = usable_share(self.machine)
            known = KernelTimes(name, processor, peak, bandwidth, usable, self._levels)
            self._kernels[name] = known
        return known

    def _copy(self, link: Link, nbytes: float) -> Demand:
        seconds = nbytes / (link.bandwidth * sustained_share(self.machine, link, self._levels))
        usable = usable_share(self.machine)
        ends = tuple(
            (self._modules(end), nbytes / (self.machine.memories[end].bandwidth * usable))
            for end in (link.source, link.destination)
        )
        alone = _demand(seconds, link.latency, ((link.lane, seconds), *ends))
        name = f"{link.source}->{link.destination}"
        slowed = self._slowed.get(name)
        return alone._replace(work_class=name, slowed=tuple(slowed)) if slowed else alone

    def _modules(self, memory: str) -> str:
        """Return the name of the memory whose bandwidth is used by copies from or to `memory`: mostly `memory` itself.

        For pinned memory, it is the host's memory, but only on a machine whose rates are peaks (see `is_rated`).
        """
        pinned = memory == self.machine.roles.pinned and is_rated(self.machine)
        return self.machine.host.memory if pinned else memory

    def _share(self, kind: str) -> float:
        return copies_of(self.machine).rates[kind].at(self._levels.get(kind, "expected"))


def slowed_beside(machine: Machine) -> dict[str, list[tuple[str, float]]]:
    """Return the measured speeds of each class of work beside others.

    Returns:
        For each class, pairs (other classes that run beside it, joined by " + "; its speed, relative to running alone).
    """
    found: dict[str, list[tuple[str, float]]] = {}
    for pair in machine.contention:
        found.setdefault(pair.work, []).append((pair.beside, pair.rate))
    return found


def _demand(working: float, fixed: float, busy: Iterable[tuple[str, float]]) -> Demand:
    seconds = working + fixed
    shares: dict[str, float] = {}
    for resource, alone in busy:
        if alone > 0:
            shares[resource] = min(1.0, round(shares.get(resource, 0.0) + alone / seconds, 3))
    return Demand(seconds, tuple(shares.items()), fixed=fixed)
