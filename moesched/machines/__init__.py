"""Machines: processors, memories and links, read from TOML profiles.

A policy never names a device: it asks for the roles `accelerator`, `host` and `weights` (the memory that the
weights come from). Every figure of a shipped profile states its source in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import msgspec

from moesched.errors import BadInput
from moesched.units import parse_bytes


class Processor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that computes.

    Attributes:
        memory: the memory that it computes from.
        flops: dense matrix-multiply rate in FLOP/s, by dtype.
        launch_seconds: fixed time per operation.
    """

    memory: str
    flops: dict[str, float]
    launch_seconds: float = 0.0


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One memory: `capacity` in bytes (a number, or text with a unit), `bandwidth` in bytes per second."""

    capacity: int | str
    bandwidth: float

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
    bandwidth: float
    latency: float = 0.0
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


class CostPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured operation, alone on the machine.

    Attributes:
        operation: what was measured, by the names that the parts of a work have.
        size: of the operation: bytes of weights, bytes moved where there are none, FLOPs of a prompt's attention.
        seconds: what it took.
        dtype: of the weights and activations; empty where that does not matter.
        rows: what weights are multiplied with.
    """

    operation: str
    size: float
    seconds: float
    dtype: str = ""
    rows: float = 1


class Contention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sort of work goes on while another runs beside it.

    Attributes:
        work, beside: "compute", "attention", or a link as "source->destination".
        rate: speed of the first, relative to being alone.
    """

    work: str
    beside: str
    rate: float


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processors, memories and links, the roles that they play, and, where it was calibrated, what operations cost."""

    name: str
    processors: dict[str, Processor]
    memories: dict[str, Tier]
    links: list[Link]
    roles: Roles
    description: str = ""
    cost_table: list[CostPoint] = []
    contention: list[Contention] = []

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
    folder = resources.files("moesched.machines")
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load_machine(name_or_file: str) -> Machine:
    """A shipped profile by its name, or a TOML file by its path.

    Raises:
        BadInput: neither exists, or the file is no machine.
    """
    path = Path(name_or_file)
    if name_or_file in machine_names():
        text = (resources.files("moesched.machines") / f"{name_or_file}.toml").read_bytes()
    elif path.is_file():
        text = path.read_bytes()
    else:
        raise BadInput(
            f"no machine {name_or_file!r}: name a TOML file or one of {', '.join(machine_names())}"
        )
    return parse_machine(text, name_or_file)


def parse_machine(text: bytes, where: str) -> Machine:
    """A machine from the text of its TOML file.

    Raises:
        BadInput: the text is no TOML, lacks a field, or names a processor, memory or link end that is not there.
    """
    try:
        machine = msgspec.toml.decode(text, type=Machine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{where}: not a machine: {error}") from None
    named: list[tuple[str, Mapping[str, object]]] = [
        (machine.roles.accelerator, machine.processors),
        (machine.roles.host, machine.processors),
    ]
    named += [(processor.memory, machine.memories) for processor in machine.processors.values()]
    named += [(end, machine.memories) for link in machine.links for end in (link.source, link.destination)]
    named += [
        (role, machine.memories) for role in (machine.roles.weights, machine.roles.pinned) if role is not None
    ]
    for name, known in named:
        if name not in known:
            raise BadInput(f"{where}: {name!r} is named but not described: it is none of {', '.join(known)}")
    return machine
