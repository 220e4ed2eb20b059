"""Describes a machine: processors, memories and links, their roles, and the measured costs of operations."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines.estimates import Estimate
from moesched.machines.networks import Network
from moesched.machines.toml_library import Amount, Price, Rate, Seconds
from moesched.units import parse_bytes

MOST_ACCELERATORS = 1024

PINNED = "pinned"
"""Name of page-locked memory in machines and budgets, if it is limited."""

INTERCONNECT = "interconnect"
"""Name of the lane and the resource that carry all-reduces."""

FEW_ROWS, MANY_ROWS = "few rows", "many rows"
"""Classes of tasks that multiply by weights: their products are bound by memory, or by compute."""

ATTENTION, ATTENTION_CALLS = "attention", "attention calls"
"""Classes of attention: one call for sequences of equal length, or a call for each of several lengths.

Concurrent tasks on the processor delay the second class more.
"""

CACHE_WRITE = "cache write"
"""Class of tasks that save new keys and values: a copy to the host in pieces, and writes to the KV cache."""

WORK_CLASSES = (FEW_ROWS, MANY_ROWS, ATTENTION, ATTENTION_CALLS, CACHE_WRITE)

BY_THEMSELVES = ("stream", "copy", "gemv", "gemm", "read")
"""Operations that earlier calibrations timed in pairs; old machine files may name them, and no prediction uses them."""


class Processor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A processor.

    Attributes:
        memory: name of the memory that the processor computes from.
        flops: dense matrix-multiply rate in FLOP/s, by dtype.
        launch_seconds: fixed time per operation, for a processor without a class of device.
        expert_bandwidth: bytes of weights per second that an expert's kernel reads; None if it reads at the memory's
            bandwidth.
        handover_seconds: time from the end of a kernel until the network may send its result.
        device_class: name of a class of device; its file in `rates/` has the shares of the stated rates that kernels
            sustain. Empty if kernels sustain the stated rates in full.
        rates: estimates of this processor's sustained rates, by name; they replace those of the class.
        replays: whether tasks of up to 128 rows are started by the replay of a graph of kernels, as on device cuda with
            `triton=true`. A graph has the kernels of one task, or of a whole decode step.
    """

    memory: str
    flops: dict[str, float]
    launch_seconds: Seconds = 0.0
    expert_bandwidth: Rate | None = None
    handover_seconds: Seconds = 0.0
    device_class: str = ""
    rates: dict[str, Estimate] = {}
    replays: bool = False


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One memory.

    Attributes:
        capacity: size in bytes, as a number or text with a unit.
        bandwidth: bytes per second.
        reserved: bytes, or text with a unit, that plans leave to the system, drivers and other programs.
    """

    capacity: int | str
    bandwidth: Rate
    reserved: int | str = 0

    @property
    def nbytes(self) -> int:
        """Bytes that plans may use: `capacity` less `reserved`."""
        return parse_bytes(self.capacity) - parse_bytes(self.reserved)


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of the connection between two memories.

    Attributes:
        source, destination: names of the memories.
        bandwidth: bytes per second.
        latency: seconds per transfer.
        path: name of the wire or bus; links with equal paths share a lane. By default "source->destination".
        sustained: share of the bandwidth that copies sustain; None for the estimate in `rates/` for this kind of copy.
    """

    source: str
    destination: str
    bandwidth: Rate
    latency: Seconds = 0.0
    path: str = ""
    sustained: Estimate | None = None

    @property
    def lane(self) -> str:
        """Name of the lane that the link's transfers run on."""
        return self.path or f"{self.source}->{self.destination}"


class Staging(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies from the host's memory into its page-locked part, needed if page-locked memory is limited.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds per copy.
        sustained: share of the bandwidth that copies sustain; None for the estimate in `rates/`.
    """

    bandwidth: Rate
    latency: Seconds = 0.0
    sustained: Estimate | None = None


class Roles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of the processor or memory in each role.

    Attributes:
        accelerator, host: processors, which may be the same one.
        weights: memory from which the weights come.
        pinned: page-locked memory through which copies to the accelerator pass; None if all host memory is page-locked.
    """

    accelerator: str
    host: str
    weights: str
    pinned: str | None = None


class Interconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connection between any two of several equal accelerators, with a lane in each direction.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds per transfer.
        paths: names that links have as `path`. The connection shares the wires of these links and competes with them;
            empty if it has wires of its own.
    """

    bandwidth: Rate
    latency: Seconds = 0.0
    paths: list[str] = []


class AcceleratorGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of equal accelerators.

    The machine describes one of them: its processor, its memory and its links. Each of the others has equal parts, with
    lanes of its own. All accelerators share the host's memory.

    Attributes:
        count: number of accelerators.
        interconnect: the connection between accelerators; None if transfers go through the host's memory.
    """

    count: Annotated[int, Meta(ge=1, le=MOST_ACCELERATORS)] = 1
    interconnect: Interconnect | None = None


class WiredMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates at which the GPU's driver wires weights (pins them in memory); it unwires arrays that are idle.

    Attributes:
        idle_seconds: idle time after which an array is unwired.
        first_bandwidth: bytes per second of wiring an array for the first time.
        again_bandwidth: bytes per second of wiring an array again.
        prestacked: True if an array holds one expert's weights of all layers, so that a use in any layer keeps the
            array wired; False if an array holds one expert's weights of one layer.
        standby: whether all arrays are wired before the first request, and stay wired until it comes.
    """

    idle_seconds: Seconds
    first_bandwidth: Rate
    again_bandwidth: Rate
    prestacked: bool = True
    standby: bool = True


class CostPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measured time of one operation that runs alone on the machine.

    Attributes:
        operation: name as in `WorkPart.operation`. A machine with a GPU also has "product" for a matrix product, and
            "dispatch KIND" for the time to start a task whose `Work.kind` is KIND. Other machines also have "dispatch",
            the time from the end of a task to the start of the next one on its lane; "await", the time by which tasks
            start later if the policy submits them only after awaiting the task before; and "resume LINK", the time by
            which a transfer on a link takes longer if the link was idle before, for some milliseconds.
        size: bytes of weights; without weights, bytes moved; for a prompt's attention, FLOPs; for a decode step's
            attention, bytes of cache of one sequence in one KV head.
        seconds: time of the operation. A dispatch on the GPU has the time of the whole task. A dispatch on the host or
            a link has the task's time less the time of its computation or its copy.
        dtype: dtype of activations and of plain weights; empty if it does not matter.
        format: storage format of coded (quantised) weights; empty for plain weights.
        rows: number of rows that are multiplied with the weights; for reads or transfers, number of pieces or pages;
            for a decode step's attention, number of KV heads; for a task's dispatch, number of its calls of experts
            or attention; for an await, number of tasks that the policy then submits.
        resource: the processor or link of the measurement; empty on a machine with one processor.
        scaled_from: dtype whose measured time was scaled to this one; empty if this time was measured.
    """

    operation: str
    size: Amount
    seconds: Seconds
    dtype: str = ""
    format: str = ""
    rows: Amount = 1
    resource: str = ""
    scaled_from: str = ""


class Contention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured speed of one class of work while other classes run beside it.

    Attributes:
        work: class of the slowed work: one of WORK_CLASSES, or a link as "source->destination". Old files may also
            name an operation that is timed without a model, such as "gemm"; predictions ignore such entries.
        beside: classes that run beside the slowed work, joined by " + " in alphabetical order.
        rate: speed of the slowed work, relative to running alone.
    """

    work: str
    beside: str
    rate: Annotated[float, Meta(ge=1e-6, le=1e6)]


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processors, memories and links, their roles, and, for a calibrated machine, the costs of operations.

    Attributes:
        measured_on: the processor that the costs were measured on; empty if they were not measured.
        cost_format: the version of the cost table's format; 0 without a cost table.
        spread: range (low, expected, high) of the measured speed of each class of work, relative to its median. Keys
            are as in `Contention.work`; on a machine with a GPU, "product" and "dispatch".
        network: the connection to other machines of this kind; None for a single machine.
        wired_memory: rates of wiring weights; None if the GPU's driver never unwires weights.
        price_usd: price of the whole machine in US dollars.
        staging: copies into page-locked memory, for runs that limit it; None if their rate is not known.
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
    spread: dict[str, Estimate] = {}
    network: Network | None = None
    price_usd: Price | None = None
    wired_memory: WiredMemory | None = None
    staging: Staging | None = None

    @property
    def accelerator(self) -> Processor:
        """The processor in the role of the accelerator."""
        return self.processors[self.roles.accelerator]

    @property
    def host(self) -> Processor:
        """The processor in the role of the host."""
        return self.processors[self.roles.host]

    @property
    def unified(self) -> bool:
        """True if accelerator and host share one memory, so that nothing is copied between them."""
        return self.accelerator.memory == self.host.memory

    @property
    def page_locked(self) -> bool:
        """True if accelerators copy from and to all of the host's memory at the link's rate, without staging."""
        return not self.unified and self.roles.pinned is None

    @property
    def weights_on_host(self) -> bool:
        """True if the weights come from the memory that the host computes from."""
        return self.roles.weights == self.host.memory

    def peak(self, processor: str, dtype: str) -> float:
        """Return the stated FLOP/s of the processor with this name in a dtype.

        Raises:
            BadInput: the machine has no rate for this dtype.
        """
        rate = self.processors[processor].flops.get(dtype)
        if rate is None:
            raise BadInput(
                f"machine {self.name}: processor {processor} has no rate for {dtype}: add it to its flops"
            )
        return rate

    def joins(self, source: str, destination: str) -> bool:
        """Test whether there is a link from the memory `source` to the memory `destination`."""
        return any((link.source, link.destination) == (source, destination) for link in self.links)

    def link(self, source: str, destination: str) -> Link:
        """Return the link from the memory `source` to the memory `destination`.

        Raises:
            BadInput: the machine has no such link.
        """
        for link in self.links:
            if (link.source, link.destination) == (source, destination):
                return link
        raise BadInput(
            f"machine {self.name} has no link from {source} to {destination}: add one to its [[links]]"
        )


def read_only(machine: Machine) -> Machine:
    """Return a copy of a machine, with dicts and lists that cannot be changed."""
    group = machine.accelerator_group
    if group.interconnect is not None:
        paths = tuple(group.interconnect.paths)
        group = replace(group, interconnect=replace(group.interconnect, paths=paths))
    processors = {
        name: replace(
            processor,
            flops=MappingProxyType(dict(processor.flops)),
            rates=MappingProxyType(dict(processor.rates)),
        )
        for name, processor in machine.processors.items()
    }
    return replace(
        machine,
        processors=MappingProxyType(processors),
        memories=MappingProxyType(dict(machine.memories)),
        links=tuple(machine.links),
        accelerator_group=group,
        cost_table=tuple(machine.cost_table),
        contention=tuple(machine.contention),
        spread=MappingProxyType(dict(machine.spread)),
    )
