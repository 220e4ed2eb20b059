"""Cost models: from the work of a task to time on a machine.

The roofline takes the longer of computing and moving bytes. Nothing is free: work on a resource that the machine
does not describe is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.tasks import Work


class Demand(NamedTuple):
    """What one task asks of the machine.

    Attributes:
        seconds: its time alone on the machine.
        shares: the share of each resource that it takes meanwhile, between 0 and 1, to three decimals, so that
            tasks of nearly the same kind share alike.
    """

    seconds: float
    shares: tuple[tuple[str, float], ...]


class Roofline:
    """Peak rates of the machine's description (MoE-Lightning, Eqs. 7 and 8)."""

    def __init__(self, machine: Machine, dtype: str) -> None:
        self.machine = machine
        self.dtype = dtype

    def work(self, work: Work) -> Demand:
        """Time alone and shares of each resource.

        Raises:
            BadInput: the machine has no such resource, or no rate for this dtype.
        """
        processor = self.machine.processors.get(work.resource)
        if processor is not None:
            if self.dtype not in processor.flops:
                raise BadInput(
                    f"machine {self.machine.name}: processor {work.resource} has no rate for {self.dtype}: add it to its flops"
                )
            computing = work.flops / processor.flops[self.dtype]
            moving = work.nbytes / self.machine.memories[processor.memory].bandwidth
            seconds = max(computing, moving) + processor.launch_seconds
            return _demand(seconds, ((work.resource, computing), (processor.memory, moving)))
        for link in self.machine.links:
            if work.resource == f"{link.source}->{link.destination}":
                seconds = work.nbytes / link.bandwidth
                ends = tuple(
                    (end, work.nbytes / self.machine.memories[end].bandwidth) for end in (link.source, link.destination)
                )
                return _demand(seconds + link.latency, ((link.lane, seconds), *ends))
        raise BadInput(
            f"machine {self.machine.name} has no cost for {work.kind} on {work.resource!r}: describe that resource in its profile"
        )


def _demand(seconds: float, busy: tuple[tuple[str, float], ...]) -> Demand:
    shares: dict[str, float] = {}
    for resource, alone in busy:
        if alone > 0:
            shares[resource] = min(1.0, round(shares.get(resource, 0.0) + alone / seconds, 3))
    return Demand(seconds, tuple(shares.items()))
