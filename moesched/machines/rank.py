"""Computes the share of a machine with several equal accelerators that one rank of a tensor-parallel model uses."""

from __future__ import annotations

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import AcceleratorGroup, Interconnect, Machine, Processor, Tier


def rank_share(machine: Machine, ranks: int) -> Machine:
    """Return the machine as one of `ranks` accelerators sees it: its own memory and links, and a share of all else.

    The host's FLOP/s, the rate at which it reads experts, the capacity and bandwidth of all memories but the
    accelerator's, and the bandwidth of links between these memories are divided by the number of ranks; latencies are
    not. Without an interconnect, transfers between accelerators go up one link and down another, in pieces that
    overlap, through the host's memory.

    Raises:
        BadInput: `ranks` is less than 1, or exceeds the number of accelerators; or `ranks` is above 1, and the machine
            has measured costs, which are for one accelerator, or has neither an interconnect nor links between the
            accelerator's and the host's memory in both directions.
    """
    count = machine.accelerator_group.count
    if not 1 <= ranks <= count:
        there = f"{count} accelerators: give 1 to {count}" if count > 1 else "one accelerator: omit it"
        raise BadInput(f"--tensor-parallel is {ranks}, and machine {machine.name} has {there}")
    if ranks == 1:
        return replace(machine, accelerator_group=AcceleratorGroup())
    if machine.cost_table:
        raise BadInput(
            f"machine {machine.name} has measured costs, which do not cover {ranks} accelerators together: "
            "use --tensor-parallel 1, or a profile without a cost_table"
        )
    own = machine.accelerator.memory
    share = replace(
        machine,
        processors={
            name: processor if name == machine.roles.accelerator else _processor(processor, ranks)
            for name, processor in machine.processors.items()
        },
        memories={
            name: tier if name == own else _tier(tier, ranks) for name, tier in machine.memories.items()
        },
        links=[
            link
            if own in (link.source, link.destination)
            else replace(link, bandwidth=link.bandwidth / ranks)
            for link in machine.links
        ],
    )
    joined_by = machine.accelerator_group.interconnect or _through_the_host(share)
    return replace(share, accelerator_group=AcceleratorGroup(count=ranks, interconnect=joined_by))


def _processor(processor: Processor, ranks: int) -> Processor:
    reading = processor.expert_bandwidth
    return replace(
        processor,
        flops={dtype: rate / ranks for dtype, rate in processor.flops.items()},
        expert_bandwidth=None if reading is None else reading / ranks,
    )


def _tier(tier: Tier, ranks: int) -> Tier:
    return Tier(capacity=tier.nbytes // ranks, bandwidth=tier.bandwidth / ranks)


def _through_the_host(share: Machine) -> Interconnect:
    here, there = share.accelerator.memory, share.host.memory
    up, down = share.link(here, there), share.link(there, here)
    bandwidth = min(up.bandwidth, down.bandwidth, share.memories[there].bandwidth / 2)
    return Interconnect(bandwidth=bandwidth, latency=up.latency + down.latency, paths=[up.lane, down.lane])
