"""Describes each of several equal accelerators by itself: a processor, a memory and links for each.

A profile describes one accelerator of a group. Here the parts of each accelerator get names of their own, which costs,
lanes and memories use. Measured costs cover only the first accelerator; work on others is then refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from moesched.machines import AcceleratorGroup, Link, Machine


def numbered(name: str, number: int) -> str:
    """Return the name of a part of an accelerator: "gpu" for number 0, then "gpu 1", "gpu 2" and so on.

    Args:
        name: name of the part in the first accelerator.
        number: number of the accelerator, from 0.
    """
    return f"{name} {number}" if number else name


def written_out(machine: Machine, count: int) -> Machine:
    """Return the machine with `count` accelerators of its group described one by one; the first one keeps its names.

    An interconnect that shares no link with the host becomes links from each accelerator to the next.
    """
    role, memory = machine.roles.accelerator, machine.accelerator.memory
    numbers = range(count)
    processors = {
        numbered(role, number): msgspec.structs.replace(machine.accelerator, memory=numbered(memory, number))
        for number in numbers
    }
    memories = {numbered(memory, number): machine.memories[memory] for number in numbers}
    common = [link for link in machine.links if memory not in (link.source, link.destination)]
    own = [link for number in numbers for link in _links_of(machine, number)]
    return msgspec.structs.replace(
        machine,
        processors=machine.processors | processors,
        memories=machine.memories | memories,
        links=[*own, *common, *_between(machine, count)],
        accelerator_group=AcceleratorGroup(),
    )


def _links_of(machine: Machine, number: int) -> Iterator[Link]:
    """Yield the links between one accelerator and the memories that all accelerators use.

    Args:
        number: number of the accelerator, from 0.
    """
    memory = machine.accelerator.memory
    names = {memory: numbered(memory, number)}
    for link in machine.links:
        if memory in (link.source, link.destination):
            yield msgspec.structs.replace(
                link,
                source=names.get(link.source, link.source),
                destination=names.get(link.destination, link.destination),
                path=link.path and numbered(link.path, number),
            )


def _between(machine: Machine, count: int) -> Iterator[Link]:
    joined, memory = machine.accelerator_group.interconnect, machine.accelerator.memory
    if joined is not None and not joined.paths:
        for number in range(1, count):
            yield Link(
                source=numbered(memory, number - 1),
                destination=numbered(memory, number),
                bandwidth=joined.bandwidth,
                latency=joined.latency,
            )
