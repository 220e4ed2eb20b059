"""Describes machines on which only a part of the host's memory can be page-locked; pages pass through this part.

If the accelerator has its own memory, a machine's description usually assumes that all host memory is page-locked, so
that accelerators copy from and to all of it at the link's rate. If page-locked memory is limited, pages are first
copied (staged) into the page-locked part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines.machine import PINNED, Contention, Link, Machine, Staging, Tier
from moesched.machines.sustained import copies_of
from moesched.units import format_bytes, parse_bytes

RING = "in pieces through page-locked memory, at the rate of the slower hop"


def within_lock_limit(machine: Machine, budgets: Mapping[str, int]) -> Machine:
    """Return the machine, with staging (copies into page-locked memory) if a budget limits page-locked memory.

    Args:
        budgets: bytes by memory.

    Raises:
        BadInput: the limit makes no sense on this machine.
    """
    return staged(machine, budgets[PINNED]) if machine.page_locked and PINNED in budgets else machine


def staged(
    machine: Machine, limit: int | str, *, ring: bool = True, option: str = f"--budget {PINNED}="
) -> Machine:
    """Return the machine with a limited page-locked memory in the role `pinned`; pages pass through it.

    Args:
        limit: bytes of page-locked memory, as a number or text such as "16GB".
        ring: whether copies between the accelerator and the rest of the host's memory go in pieces through a ring in
            page-locked memory, as on device cuda: at the rate of the link or of copies within the host's memory,
            whichever is lower. Otherwise the copies are pageable: the GPU's driver stages them on one thread.
        option: the beginning of the option that gave the limit, such as `--budget pinned=`, for error messages.

    Raises:
        BadInput: accelerator and host share a memory, memory is staged already, the machine does not say how fast its
            host copies, or the limit is 0, or is not less than the host's memory.
    """
    if not machine.page_locked:
        problem = "one memory for all" if machine.unified else f"{machine.roles.pinned} memory already"
        raise BadInput(f"machine {machine.name} has {problem}: it cannot be staged")
    host, nbytes = machine.memories[machine.host.memory], parse_bytes(limit)
    if not 0 < nbytes < host.nbytes:
        raise BadInput(
            f"{option}{format_bytes(nbytes)} limits page-locked memory of {format_bytes(host.nbytes)}: "
            "give less than that and more than 0, or omit it where all of it may be locked"
        )
    if machine.staging is None:
        raise BadInput(
            f"{option}{format_bytes(nbytes)}: machine {machine.name} does not say how fast its host copies into "
            "page-locked memory: add [staging] with its bandwidth"
        )
    memories: dict[str, Tier] = {}
    for name, tier in machine.memories.items():
        memories[name] = tier
        if name == machine.host.memory:
            memories[PINNED] = Tier(capacity=limit, bandwidth=tier.bandwidth)
    return replace(
        machine,
        memories=memories,
        links=list(_links(machine, machine.staging, ring)),
        roles=replace(machine.roles, pinned=PINNED),
        contention=[_renamed(pair, machine) for pair in machine.contention],
        staging=None,
    )


def _links(machine: Machine, staging: Staging, ring: bool) -> Iterator[Link]:
    """Yield the links of a machine with staging: those of page-locked memory, and those of the rest of host memory.

    Args:
        ring: whether copies between accelerator and host memory go in pieces through page-locked memory.
    """
    host, accelerator = machine.host.memory, machine.accelerator.memory
    for link in machine.links:
        if link.destination == host and link.source != accelerator:
            yield replace(link, destination=PINNED, path=link.lane)
        if (link.source, link.destination) == (host, accelerator):
            yield replace(link, source=PINNED, path=link.lane)
        direct = {host, accelerator} == {link.source, link.destination}
        yield _through_ring(machine, link, staging) if direct and ring else link
    yield Link(
        source=host,
        destination=PINNED,
        bandwidth=staging.bandwidth,
        latency=staging.latency,
        sustained=staging.sustained,
    )


def _through_ring(machine: Machine, link: Link, staging: Staging) -> Link:
    """Return a link between accelerator and host memory with the rate of copies in pieces through page-locked memory.

    The rate is the link's or that of copies within the host's memory (`staging`), whichever is lower.
    """
    slower, kind = (link, "pinned") if link.bandwidth <= staging.bandwidth else (staging, "host_copies")
    sustained = slower.sustained or copies_of(machine).rates[kind]
    return replace(link, bandwidth=slower.bandwidth, sustained=replace(sustained, source=RING))


def _renamed(pair: Contention, machine: Machine) -> Contention:
    """Return measured contention in which the class of copies from host to accelerator is named as from `PINNED`."""
    host, accelerator = machine.host.memory, machine.accelerator.memory
    names = {f"{host}->{accelerator}": f"{PINNED}->{accelerator}"}
    beside = sorted(names.get(name, name) for name in pair.beside.split(" + "))
    return replace(pair, work=names.get(pair.work, pair.work), beside=" + ".join(beside))
