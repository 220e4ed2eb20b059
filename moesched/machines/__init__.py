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
"""The lane and the resource that carry all-reduces."""

FEW_ROWS, MANY_ROWS = "few rows", "many rows"
"""Sorts of tasks on weights: products that are bound by memory, and products that are bound by compute."""

ATTENTION, ATTENTION_CALLS = "attention", "attention calls"
"""Attention over sequences of one length, which is one call, and over several lengths, with a call for each. Other
tasks on the processor delay the second kind more."""

SORTS = (FEW_ROWS, MANY_ROWS, ATTENTION, ATTENTION_CALLS)

BY_THEMSELVES = ("stream", "copy", "gemv", "gemm", "read")
"""Operations that are timed by themselves and in pairs: `gemv` is a product of one row, `read` reads the disk."""

COST_FORMAT = 2
"""The version of the cost table's format."""


class Processor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A processor.

    Attributes:
        memory: the memory that it computes from.
        flops: dense matrix-multiply rate in FLOP/s, by dtype.
        launch_seconds: fixed time per operation.
        expert_bandwidth: bytes of weights per second that an expert's kernel reads, where that is less than the
            memory's bandwidth.
        handover_seconds: time from the end of a kernel until the network may send its result.
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
        path: the wire or bus; links that share a path share a lane. By default "source->destination".
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
    """The processors that play accelerator and host (possibly the same one), and the memory that holds all weights."""

    accelerator: str
    host: str
    weights: str
    pinned: str | None = None


class Interconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connection between equal accelerators: one between any two of them, with a lane in each direction.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds per transfer.
        paths: the paths of the links that carry it, where it has no wires of its own. It then competes with them.
    """

    bandwidth: Positive
    latency: NotNegative = 0.0
    paths: list[str] = []


class AcceleratorGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of equal accelerators.

    The machine describes one of them: its processor, its memory, and the links that begin or end there. Each of the
    others has the same, with lanes of its own. All share the host's memory.

    Attributes:
        interconnect: without one, transfers between accelerators go through the host's memory.
    """

    count: Annotated[int, Meta(ge=1)] = 1
    interconnect: Interconnect | None = None


class WiredMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wiring of weights by the accelerator's driver, which unwires them when they are idle.

    Attributes:
        idle_seconds: idle time after which an array is unwired.
        first_bandwidth: bytes per second of wiring an array for the first time.
        again_bandwidth: bytes per second of wiring it again.
        prestacked: whether an expert's weights of all layers are one array, which any layer's use keeps wired;
            otherwise there is one array per layer.
        standby: whether all arrays are wired before the first request, and stay so until it comes.
    """

    idle_seconds: Positive
    first_bandwidth: Positive
    again_bandwidth: Positive
    prestacked: bool = True
    standby: bool = True


class CostPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time of one operation, alone on the machine.

    Attributes:
        operation: its name, as in `WorkPart.operation`.
        size: bytes of weights; bytes moved where there are no weights; FLOPs of a prompt's attention; bytes of a KV
            head in a decode step's attention.
        seconds: its time.
        dtype: of the weights and activations; empty where that does not matter.
        rows: rows that the weights are multiplied with; the number of reads or transfers of that size; the number of
            KV heads of a decode step's attention.
        scaled_from: the dtype whose measured time this one was scaled from; empty where it was measured itself.
    """

    operation: str
    size: NotNegative
    seconds: NotNegative
    dtype: str = ""
    rows: NotNegative = 1
    scaled_from: str = ""


class Contention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speed of one sort of work while others run beside it.

    Attributes:
        work, beside: the sort, and the sorts beside it, joined by " + " in alphabetical order. Tasks are one of SORTS,
            or a link as "source->destination"; operations timed by themselves are one of BY_THEMSELVES.
        rate: its speed, relative to being alone.
    """

    work: str
    beside: str
    rate: Positive


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processors, memories and links, their roles, and, for a calibrated machine, the costs of operations.

    Attributes:
        measured_on: the processor that the costs were measured on; empty where they were not measured.
        cost_format: the version of the cost table's format; 0 without a cost table.
        network: the connection to other nodes like it.
        wired_memory: wiring of weights; None where the accelerator's driver never unwires them.
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
    cost_format: int = 0
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
        """Whether accelerator and host share one memory, so that nothing is copied between them."""
        return self.accelerator.memory == self.host.memory

    @property
    def weights_on_host(self) -> bool:
        """Whether the weights come from the memory that the host computes from."""
        return self.roles.weights == self.host.memory

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
        BadInput: neither exists, or the file does not describe a machine.
    """
    return parse_machine(profile_text("moesched.machines", "machine", name_or_file), name_or_file)


def parse_machine(text: bytes, where: str) -> Machine:
    """A machine from the text of its TOML file.

    Raises:
        BadInput: the text is not TOML, a figure is missing or impossible, a processor or a memory is named but not
            described, or the costs were measured by another version. The message names `where` and the key.
    """
    raw = decode_profile(text, "machine", where)
    found = raw.get("cost_format", 0)
    if raw.get("cost_table") and found != COST_FORMAT:
        raise BadInput(
            f"{where}: cost_format: its costs are in format {found}, and this version reads {COST_FORMAT}: "
            f"measure them again with `moesched calibrate --out {where}`"
        )
    for section, kind in (("processors", Processor), ("memories", Tier)):
        entries = raw.get(section)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            convert_profile(entry, kind, f"{section}.{name}", where)
    machine = convert_profile(raw, Machine, "", where)
    for problem in _problems(machine):
        raise BadInput(f"{where}: {problem}")
    return machine


def _problems(machine: Machine) -> Iterator[str]:
    """Problems of a machine that has all keys, each beginning with its key."""
    for name, processor in machine.processors.items():
        key = f"processors.{name}"
        yield from _unknown(f"{key}.memory", processor.memory, machine.memories)
        if not processor.flops:
            yield f"{key}.flops: it is empty: give a rate for each dtype, such as bfloat16 = 1e12"
        for dtype, rate in processor.flops.items():
            if not 0 < rate < ABSURD:
                yield f"{key}.flops.{dtype}: {rate} is not a rate: it must be positive"
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
    known = {*SORTS, *BY_THEMSELVES}
    known |= {f"{link.source}->{link.destination}" for link in machine.links}
    for number, pair in enumerate(machine.contention):
        for sort in (pair.work, *pair.beside.split(" + ")):
            if sort not in known:
                yield f"contention[{number}]: {sort!r} is not a sort of work: measure again with `moesched calibrate`"


def _capacity_problems(key: str, tier: Tier) -> Iterator[str]:
    try:
        if tier.nbytes <= 0:
            yield f"{key}: {tier.capacity} is not a capacity: it must be positive"
    except BadInput as error:
        yield f"{key}: {error}"


def _unknown(key: str, name: str, known: Collection[str]) -> Iterator[str]:
    if name not in known:
        yield f"{key}: {name!r} is not described: use one of {', '.join(known)}"
