"""Machines: processors, memories and links, read from TOML profiles.

A policy never names a device: it asks for the roles `accelerator`, `host` and `weights` (the memory that the
weights come from). Every figure of a shipped profile states its source in the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from moesched.errors import BadInput
from moesched.machines.networks import Network
from moesched.machines.toml_library import (
    ABSURD,
    NotNegative,
    Positive,
    convert_profile,
    decode_profile,
    profile_names,
    profile_text,
)
from moesched.units import parse_bytes

INTERCONNECT = "interconnect"
"""What carries all-reduces: the name of a lane and of a resource."""

FEW_ROWS, MANY_ROWS = "few rows", "many rows"
"""Sorts of tasks that compute: products that wait for their weights, and products that do not."""

ATTENTION, ATTENTION_CALLS = "attention", "attention calls"
"""Attention over sequences of one length, which is one call, and over others, in several: what else runs on the
processor comes between these."""

SORTS = (FEW_ROWS, MANY_ROWS, ATTENTION, ATTENTION_CALLS)

BY_THEMSELVES = ("stream", "copy", "gemv", "gemm", "read")
"""Operations that are timed by themselves, pair by pair: `gemv` is a product of one row, `read` is from the disk."""


class Processor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that computes.

    Attributes:
        memory: the memory that it computes from.
        flops: dense matrix-multiply rate in FLOP/s, by dtype.
        launch_seconds: fixed time per operation.
        expert_bandwidth: bytes of weights per second that an expert's kernel was seen to read, where that is less than
            the memory gives.
        handover_seconds: what passes from the end of a kernel until the network has what it made.
    """

    memory: str
    flops: dict[str, float]
    launch_seconds: NotNegative = 0.0
    expert_bandwidth: Positive | None = None
    handover_seconds: NotNegative = 0.0


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One memory: `capacity` in bytes (a number, or text with a unit), `bandwidth` in bytes per second."""

    capacity: int | str
    bandwidth: Positive

    @property
    def nbytes(self) -> int:
        """The capacity in bytes."""
        return parse_bytes(self.capacity)


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction between two memories.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds per transfer.
        path: what carries it; links that share a path share a lane. By default "source->destination".
    """

    source: str
    destination: str
    bandwidth: Positive
    latency: NotNegative = 0.0
    path: str = ""

    @property
    def lane(self) -> str:
        """The name of the lane that its transfers run on."""
        return self.path or f"{self.source}->{self.destination}"


class Roles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who plays what: two processors (they may be the same one), and the memory that the weights come from."""

    accelerator: str
    host: str
    weights: str
    pinned: str | None = None


class Interconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins equal accelerators: between any two of them, each direction by itself.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds per transfer.
        paths: of the links that carry it, where it has no wires of its own: what crosses it slows their transfers.
    """

    bandwidth: Positive
    latency: NotNegative = 0.0
    paths: list[str] = []


class AcceleratorGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many equal accelerators there are.

    What the machine says of its accelerator holds for each of them: the processor, its memory, and the links that
    begin or end there, so that links to different accelerators do not share a lane. Host memory they share.

    Attributes:
        interconnect: what joins them; without one, what passes between them goes through the host's memory.
    """

    count: Annotated[int, Meta(ge=1)] = 1
    interconnect: Interconnect | None = None


class WiredMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the accelerator's driver keeps weights at hand: wired, as long as they are used.

    Attributes:
        idle_seconds: after which an array that no kernel used is wired no more.
        first_bandwidth: bytes per second of wiring an array for the first time.
        again_bandwidth: bytes per second of wiring it again.
        prestacked: whether an expert's weights of all layers are one array, which any layer's use keeps wired;
            otherwise each layer's are one.
        standby: whether all arrays are wired before the first request, and kept so until it comes.
    """

    idle_seconds: Positive
    first_bandwidth: Positive
    again_bandwidth: Positive
    prestacked: bool = True
    standby: bool = True


class CostPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured operation, alone on the machine.

    Attributes:
        operation: what was measured, by the names that the parts of a work have.
        size: of the operation: bytes of weights, bytes moved where there are none, FLOPs of a prompt's attention, bytes
            of a KV head in a step's.
        seconds: what it took.
        dtype: of the weights and activations; empty where that does not matter.
        rows: what weights are multiplied with; of reads and transfers, how many of that size; of a step's attention,
            how many KV heads.
    """

    operation: str
    size: NotNegative
    seconds: NotNegative
    dtype: str = ""
    rows: NotNegative = 1


class Contention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sort of work goes on while others run beside it.

    Attributes:
        work, beside: the sort, and what runs beside it, several sorts at once joined by " + " in alphabetical order. Of
            tasks one of SORTS, or a link as "source->destination"; or two of BY_THEMSELVES.
        rate: its speed, relative to being alone.
    """

    work: str
    beside: str
    rate: Positive


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processors, memories and links, the roles that they play, and, where it was calibrated, what operations cost.

    Attributes:
        measured_on: on what processor that was measured; empty where it was not.
        network: what joins it to other nodes like it.
        wiring: of weights in its memory; None where they are at hand in any case.
        price_usd: of the whole machine.
    """

    name: str
    processors: dict[str, Processor]
    memories: dict[str, Tier]
    links: list[Link]
    roles: Roles
    description: str = ""
    measured_on: str = ""
    accelerator_group: AcceleratorGroup = AcceleratorGroup()
    cost_table: list[CostPoint] = []
    contention: list[Contention] = []
    network: Network | None = None
    price_usd: Positive | None = None
    wired_memory: WiredMemory | None = None

    @property
    def accelerator(self) -> Processor:
        """The processor that plays the accelerator."""
        return self.processors[self.roles.accelerator]

    @property
    def host(self) -> Processor:
        """The processor that plays the host."""
        return self.processors[self.roles.host]

    @property
    def unified(self) -> bool:
        """Whether accelerator and host compute from the same memory, so that nothing is copied between them."""
        return self.accelerator.memory == self.host.memory

    def peak(self, processor: str, dtype: str) -> float:
        """FLOP/s of one of its processors in a dtype.

        Raises:
            BadInput: the machine has no rate for it.
        """
        rate = self.processors[processor].flops.get(dtype)
        if rate is None:
            raise BadInput(
                f"machine {self.name}: processor {processor} has no rate for {dtype}: add it to its flops"
            )
        return rate

    def link(self, source: str, destination: str) -> Link:
        """The link from one memory to another.

        Raises:
            BadInput: the machine has none.
        """
        for link in self.links:
            if (link.source, link.destination) == (source, destination):
                return link
        raise BadInput(
            f"machine {self.name} has no link from {source} to {destination}: add one to its [[links]]"
        )


def machine_names() -> list[str]:
    """The names of the profiles that ship."""
    return profile_names("moesched.machines")


def load_machine(name_or_file: str) -> Machine:
    """A shipped profile by its name, or a TOML file by its path.

    Raises:
        BadInput: neither exists, or the file is no machine.
    """
    return parse_machine(profile_text("moesched.machines", "machine", name_or_file), name_or_file)


def parse_machine(text: bytes, where: str) -> Machine:
    """A machine from the text of its TOML file.

    Raises:
        BadInput: the text is no TOML, lacks a figure or has one that cannot be, or names a processor or a memory
            that is not there. The message names `where` and the key.
    """
    raw = decode_profile(text, "machine", where)
    for section, kind in (("processors", Processor), ("memories", Tier)):
        entries = raw.get(section)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            convert_profile(entry, kind, f"{section}.{name}", where)
    machine = convert_profile(raw, Machine, "", where)
    for problem in _problems(machine):
        raise BadInput(f"{where}: {problem}")
    return machine


def _problems(machine: Machine) -> Iterator[str]:
    """What is wrong with a machine all of whose keys are there, each beginning with its key."""
    for name, processor in machine.processors.items():
        key = f"processors.{name}"
        yield from _unknown(f"{key}.memory", processor.memory, machine.memories)
        if not processor.flops:
            yield f"{key}.flops: it is empty: give a rate for each dtype, such as bfloat16 = 1e12"
        for dtype, rate in processor.flops.items():
            if not 0 < rate < ABSURD:
                yield f"{key}.flops.{dtype}: {rate} is no rate: it must be positive"
    for name, tier in machine.memories.items():
        yield from _capacity_problems(f"memories.{name}.capacity", tier)
    yield from _link_problems(machine)
    yield from _contention_problems(machine)
    roles = machine.roles
    yield from _unknown("roles.accelerator", roles.accelerator, machine.processors)
    yield from _unknown("roles.host", roles.host, machine.processors)
    yield from _unknown("roles.weights", roles.weights, machine.memories)
    if roles.pinned is not None:
        yield from _unknown("roles.pinned", roles.pinned, machine.memories)
    if machine.wired_memory is not None and not machine.unified:
        yield "wiring: it is of memory that accelerator and host share: leave it out, or give them one memory"
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
            yield f"links[{number}]: a second link from {link.source!r} to {link.destination!r}: leave one out"
        seen.add(ends)
    joined = machine.accelerator_group.interconnect
    for number, path in enumerate(joined.paths if joined else []):
        yield from _unknown(
            f"accelerator_group.interconnect.paths[{number}]", path, [link.lane for link in machine.links]
        )


def _contention_problems(machine: Machine) -> Iterator[str]:
    known = {*SORTS, *BY_THEMSELVES}
    known |= {f"{link.source}->{link.destination}" for link in machine.links}
    for number, pair in enumerate(machine.contention):
        for sort in (pair.work, *pair.beside.split(" + ")):
            if sort not in known:
                yield f"contention[{number}]: {sort!r} is no sort of work: measure again with `moesched calibrate`"


def _capacity_problems(key: str, tier: Tier) -> Iterator[str]:
    try:
        if tier.nbytes <= 0:
            yield f"{key}: {tier.capacity} is no capacity: it must be positive"
    except BadInput as error:
        yield f"{key}: {error}"


def _unknown(key: str, name: str, known: Collection[str]) -> Iterator[str]:
    if name not in known:
        yield f"{key}: {name!r} is not described: it is none of {', '.join(known)}"
