"""Loads and checks machines from TOML files: shipped profiles, and users' own files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from moesched.errors import BadInput
from moesched.machines.estimates import Estimate, estimate_problems
from moesched.machines.machine import BY_THEMSELVES, PINNED, WORK_CLASSES, Machine, Processor, Tier
from moesched.machines.part_names import option_of_part
from moesched.machines.sustained import rate_problems
from moesched.machines.toml_library import (
    MOST_RATE,
    convert_profile,
    decode_profile,
    profile_names,
    profile_text,
)

COST_FORMAT = 2
"""Version of the format of cost tables in machine files."""


def machine_names() -> list[str]:
    """Return the names of the shipped profiles of machines."""
    return profile_names("moesched.machines")


def load_machine(name_or_file: str) -> Machine:
    """Load a machine: a shipped profile by its name, or a TOML file by its path.

    Raises:
        BadInput: there is no such profile or file, or the file does not describe a machine.
    """
    try:
        text = profile_text("moesched.machines", "machine", name_or_file)
    except BadInput:
        option = option_of_part(name_or_file) if isinstance(name_or_file, str) else None
        if option is None or Path(name_or_file).suffix or name_or_file.strip(" ,").lower() in machine_names():
            raise
        remedy = (
            f"it is a part of machines: `moesched machine {option}`, with the parts beside it, writes a file to "
            "name here"
        )
        raise BadInput(f"no machine {name_or_file!r}: {remedy}") from None
    return parse_machine(text, name_or_file)


def parse_machine(text: bytes, where: str) -> Machine:
    """Parse a machine from the text of its TOML file.

    Args:
        where: name of the file, for error messages.

    Raises:
        BadInput: the text is not TOML, a figure is missing or impossible, a processor or a memory is named but not
            described, or the costs were measured by another version. The message names `where` and the key.
    """
    return machine_from(decode_profile(text, "machine", where), where)


def machine_from(raw: dict[str, Any], where: str) -> Machine:
    """Make a machine from the contents of its file.

    Args:
        raw: the tables of the file, as dicts and lists.
        where: name of the file, for error messages.

    Raises:
        BadInput: as in `parse_machine`.
    """
    found = raw.get("cost_format", 0)
    if raw.get("cost_table") and found != COST_FORMAT:
        raise BadInput(
            f"{where}: cost_format: its costs are in format {found}, and this version reads {COST_FORMAT}: "
            f"measure them again with `moesched calibrate --out {where}`"
        )
    for section, kind in (("processors", Processor), ("memories", Tier)):
        for name, entry in _entries(raw, section):
            for rate, estimate in _entries(entry, "rates"):
                convert_profile(estimate, Estimate, f"{section}.{name}.rates.{rate}", where)
            convert_profile(entry, kind, f"{section}.{name}", where)
    machine = convert_profile(raw, Machine, "", where)
    for problem in _problems(machine):
        raise BadInput(f"{where}: {problem}")
    return machine


def _entries(raw: Any, section: str) -> Iterable[tuple[str, Any]]:
    """Return the (name, value) pairs of the table `raw[section]`; none if `raw` or `raw[section]` is not a table."""
    entries = raw.get(section) if isinstance(raw, dict) else None
    return entries.items() if isinstance(entries, dict) else ()


def _problems(machine: Machine) -> Iterator[str]:
    """Yield sentences on what is wrong with a machine whose keys are all present; each begins with the key at fault."""
    for name, processor in machine.processors.items():
        key = f"processors.{name}"
        yield from _unknown(f"{key}.memory", processor.memory, machine.memories)
        if not processor.flops:
            yield f"{key}.flops is empty: give a rate for each dtype, such as bfloat16 = 1e12"
        for dtype, rate in processor.flops.items():
            if not 1 <= rate < MOST_RATE:
                yield f"{key}.flops.{dtype} is {rate:g}: give a rate from 1 on"
    for name, tier in machine.memories.items():
        yield from _capacity_problems(f"memories.{name}.capacity", tier)
    yield from _link_problems(machine)
    yield from rate_problems(machine)
    roles = machine.roles
    yield from _unknown("roles.accelerator", roles.accelerator, machine.processors)
    yield from _unknown("roles.host", roles.host, machine.processors)
    yield from _unknown("roles.weights", roles.weights, machine.memories)
    if roles.weights == machine.accelerator.memory:
        yield (
            f"roles.weights: {roles.weights!r} is the accelerator's own memory, which weights are loaded into: name "
            "the memory that they come from, such as a disk, and add it to [memories] and [[links]]"
        )
    if roles.pinned is not None:
        yield from _unknown("roles.pinned", roles.pinned, machine.memories)
    yield from _contention_problems(machine)
    yield from _staging_problems(machine)
    if machine.wired_memory is not None and not machine.unified:
        yield "wired_memory: accelerator and host have separate memories: omit it, or give them one memory"
    if machine.accelerator_group.count > 1 and machine.unified:
        memory = machine.host.memory
        yield f"accelerator_group.count: several accelerators need memories of their own, not the host's {memory!r}"


def _link_problems(machine: Machine) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for number, link in enumerate(machine.links):
        yield from _unknown(f"links[{number}].source", link.source, machine.memories)
        yield from _unknown(f"links[{number}].destination", link.destination, machine.memories)
        ends = (link.source, link.destination)
        if link.source == link.destination:
            yield f"links[{number}]: it joins {link.source!r} to itself: name two memories"
        if ends in seen:
            yield f"links[{number}]: a second link from {link.source!r} to {link.destination!r}: remove one"
        seen.add(ends)
    joined = machine.accelerator_group.interconnect
    for number, path in enumerate(joined.paths if joined else []):
        yield from _unknown(
            f"accelerator_group.interconnect.paths[{number}]", path, [link.lane for link in machine.links]
        )


def _contention_problems(machine: Machine) -> Iterator[str]:
    known = {*WORK_CLASSES, *BY_THEMSELVES}
    known |= {f"{link.source}->{link.destination}" for link in machine.links}
    known |= {f"{machine.host.memory}->{PINNED}"} if machine.staging else set()
    for number, pair in enumerate(machine.contention):
        for name in (pair.work, *pair.beside.split(" + ")):
            if name not in known:
                yield f"contention[{number}]: {name!r} is not a kind of work: measure again with `moesched calibrate`"


def _staging_problems(machine: Machine) -> Iterator[str]:
    if machine.staging is None:
        return
    if machine.unified:
        yield "staging: accelerator and host share a memory, so nothing is copied: omit it"
    if machine.roles.pinned is not None:
        yield "staging: the role pinned names a memory that pages always pass through: omit one of both"
    if PINNED in machine.memories:
        yield f"memories.{PINNED}: a limit of page-locked memory adds one of this name: rename it"
    if machine.staging.sustained is not None:
        yield from estimate_problems("staging.sustained", machine.staging.sustained)


def _capacity_problems(key: str, tier: Tier) -> Iterator[str]:
    try:
        if tier.nbytes <= 0:
            kept = f", of which {tier.reserved} is reserved" if tier.reserved else ""
            yield f"{key} is {tier.capacity}{kept}: give a capacity that leaves something to plans"
    except BadInput as error:
        yield f"{key}: {error}"


def _unknown(key: str, name: str, known: Collection[str]) -> Iterator[str]:
    if name not in known:
        yield f"{key}: {name!r} is not described: use one of {', '.join(known)}"
