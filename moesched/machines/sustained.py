"""Finds sustained rates: the share of a machine's stated rates that kernels and copies reach.

A processor names its class of device, whose shares are in a file of the folder `rates/`; shares under `rates` in the
machine's own file replace them. If no processor of a machine names a class, the stated rates count as reached in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

import msgspec
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines.estimates import Estimate, Level, estimate_problems
from moesched.machines.machine import Link, Machine, Processor
from moesched.machines.toml_library import profile_names

PACKAGE = "moesched.machines.rates"
STATED, COPIES, STATED_COPIES = "as-stated", "copies", "copies-as-stated"
OF_NO_DEVICE = (STATED, COPIES, STATED_COPIES)

MEMORY_EFFICIENCY = 0.8
"""Share of its line rate that a memory delivers to all users together; assumed: STREAM has 75 to 85 % on servers."""

WORDS = {
    "products": "matrix products of many rows",
    "weights": "reading weights for few rows",
    "attention": "reading the KV cache in attention",
    "prompts": "attention over prompts",
    "moves": "moving activations",
    "wake_seconds": "waking the threads",
    "launch_seconds": "starting a kernel",
    "host_seconds": "waiting for the host",
    "step_seconds": "the host between steps",
    "pinned": "copies of pinned memory",
    "pageable": "copies of pageable memory",
    "host_copies": "copies within the host's memory",
    "disk": "reading the disk",
    "interconnect": "copies between accelerators",
    "network": "exchanges over the network",
}
"""Names of the rates, with words for people."""

Levels = Mapping[str, Level]
"""The figure of its estimates that each of some groups of rates uses; other groups use the expected figure."""


class DeviceClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sustained rates of a class of device.

    Attributes:
        rates: estimates by name of the rate, a key of WORDS.
        tile_rows: number of rows of a kernel's tile. A product of fewer rows takes the FLOPs of a whole tile, unless
            it has at most `few_rows` rows.
        few_rows: the largest number of rows for which kernels read the weights once and compute no tiles.
        turns: share of the computing time, from 0 to 1, in which memory cannot be read because of the power limit; in
            the rest of the time, reading and computing overlap.
    """

    description: str
    rates: dict[str, Estimate]
    tile_rows: float = 0.0
    few_rows: float = 0.0
    turns: float = 0.0


def class_names() -> list[str]:
    """Return the names of the shipped classes of device, such as "consumer-gpu"."""
    return [name for name in profile_names(PACKAGE) if name not in OF_NO_DEVICE]


@cache
def device_class(name: str) -> DeviceClass:
    """Return a class of device by its name.

    The empty name is for processors that sustain all of their stated rates.

    Raises:
        BadInput: there is no class of that name.
    """
    if name and name not in class_names():
        raise BadInput(f"{name!r} is no class of device: use one of {', '.join(class_names())}")
    return _read(name or STATED)


@cache
def _read(name: str) -> DeviceClass:
    text = (resources.files(PACKAGE) / f"{name}.toml").read_bytes()
    return msgspec.toml.decode(text, type=DeviceClass)


def rates_of(processor: Processor) -> dict[str, Estimate]:
    """Return the sustained rates of a processor by name: its own where it has any, else the rates of its class."""
    return device_class(processor.device_class).rates | processor.rates


def copies_of(machine: Machine) -> DeviceClass:
    """Return the sustained rates of copies and of the network in a `DeviceClass`, by kind of copy (a key of WORDS)."""
    return _read(COPIES if is_rated(machine) else STATED_COPIES)


def is_rated(machine: Machine) -> bool:
    """Test whether the rates that a machine states are peaks, as data sheets have them, and not measured rates.

    They are peaks if the description of any of its processors has a class of device.
    """
    return any(processor.device_class for processor in machine.processors.values())


def at_peak(machine: Machine) -> Machine:
    """Return the machine with all stated rates taken to be sustained in full, without any class of device."""
    processors = {
        name: replace(processor, device_class="", rates={}) for name, processor in machine.processors.items()
    }
    links = [replace(link, sustained=None) for link in machine.links]
    staging = machine.staging and replace(machine.staging, sustained=None)
    return replace(machine, processors=processors, links=links, staging=staging)


def usable_share(machine: Machine) -> float:
    """Return the share of its stated bandwidth, from 0 to 1, that a memory gives to all readers and writers together.

    The share is the same for every memory of the machine. It is below 1 if the stated rates are peaks.
    """
    return MEMORY_EFFICIENCY if is_rated(machine) else 1.0


def link_kind(machine: Machine, link: Link) -> str:
    """Return the kind of copy on a link, such as "pinned", "pageable" or "disk": a key of WORDS.

    If all host memory is page-locked, so that `machine.roles.pinned` is None, all copies between host and accelerator
    are "pinned".
    """
    hosts = {machine.host.memory, machine.roles.pinned}
    ends = {link.source, link.destination}
    if ends <= hosts:
        return "host_copies"
    if not _is_memory_of_processor(machine, link.source) and link.source != machine.roles.pinned:
        return "disk"
    if machine.roles.pinned is not None and machine.host.memory in ends:
        return "pageable"
    return "pinned"


def sustained_share(machine: Machine, link: Link, levels: Levels) -> float:
    """Return the share of a link's stated bandwidth, from 0 to 1, that copies sustain.

    Args:
        levels: for some kinds of copy, "low" or "high": the figure of the kind's estimate to use. Other kinds use the
            expected figure.
    """
    kind = link_kind(machine, link)
    estimate = link.sustained or copies_of(machine).rates[kind]
    return estimate.at(levels.get(kind, "expected"))


def groups(machine: Machine) -> dict[str, str]:
    """Return a label in words for each group of rates, by the group's name.

    An uncertainty band sets all rates of a group to their low or high figures at once. A group is a rate of a class of
    device, or a kind of copy. A calibrated machine also has a group for each class of work whose spread was measured,
    and has only such groups if its accelerator and host share one memory.
    """
    found = {name: f"measured: {name}" for name in machine.spread}
    if machine.cost_table and machine.unified:
        return found
    for name, processor in machine.processors.items():
        for rate in rates_of(processor):
            found[group(name, processor, rate)] = f"{processor.device_class or name}: {WORDS[rate]}"
    kinds = {link_kind(machine, link) for link in machine.links}
    if machine.accelerator_group.interconnect is not None:
        kinds.add("interconnect")
    if machine.network is not None:
        kinds.add("network")
    return found | {kind: WORDS[kind] for kind in WORDS if kind in kinds}


def group(name: str, processor: Processor, rate: str) -> str:
    """Return the name of the group of rates that a rate of a processor belongs to.

    Args:
        name: name of the processor, used if the processor has no class of device.
        rate: name of the rate.
    """
    return f"{processor.device_class or name}.{rate}"


def rate_problems(machine: Machine) -> Iterator[str]:
    """Yield sentences on what is wrong with a machine's classes of device and estimates.

    Each sentence begins with the key at fault.
    """
    for name, processor in machine.processors.items():
        key = f"processors.{name}"
        if processor.device_class and processor.device_class not in class_names():
            known = ", ".join(class_names())
            yield f"{key}.device_class: {processor.device_class!r} is not known: use one of {known}"
            continue
        known_rates = device_class(processor.device_class).rates
        for rate, estimate in processor.rates.items():
            if rate not in known_rates:
                yield f"{key}.rates: {rate!r} is not a rate of this class: use one of {', '.join(known_rates)}"
            yield from estimate_problems(f"{key}.rates.{rate}", estimate)
    for name, estimate in machine.spread.items():
        yield from estimate_problems(f"spread.{name}", estimate)
    for number, link in enumerate(machine.links):
        if link.sustained is not None:
            yield from estimate_problems(f"links[{number}].sustained", link.sustained)


def _is_memory_of_processor(machine: Machine, memory: str) -> bool:
    return any(processor.memory == memory for processor in machine.processors.values())
