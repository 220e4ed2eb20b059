"""The library of parts: GPUs, chips whose CPU and GPU share one memory, CPUs and types of memory.

The files in library/ list the parts by series. A part inherits the figures of its series unless it has its own. Figures
are from data sheets; each series names its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

from moesched.machines.toml_library import Rate, convert_profile, decode_profile
from moesched.units import parse_bytes

PartT = TypeVar("PartT", bound="Part")

FILES = {
    "gpus": ("gpus-nvidia", "gpus-amd-intel"),
    "chips": ("chips",),
    "cpus": ("cpus",),
    "memories": ("memories",),
}


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the library.

    Attributes:
        series: name of the family that the part belongs to.
        source: the publication from which the part's figures are taken.
    """

    name: str
    series: str
    source: str


class Board(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A board that has a GPU and its CPU; the GPU has no slot and is not combined with another CPU.

    Attributes:
        cpu: name of the CPU.
        link: name of the link between GPU and CPU.
        to_gpu, to_host: bytes per second of copies in each direction.
    """

    cpu: str
    link: str
    to_gpu: Rate
    to_host: Rate


class Gpu(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A graphics processor with a memory of its own.

    Attributes:
        memory: size of the memory, as text with a unit.
        usable: size of the memory without the bytes for error correction, as text; None if all is usable.
        bandwidth: bytes per second of the memory.
        watts: power limit.
        device_class: name of the class of device, such as "consumer-gpu"; its file in `rates/` has the rates that
            kernels sustain.
        pcie: generation and lanes of the slot, such as "4x16".
        float32: FLOP/s of the vector units.
        half: dense FLOP/s of 16-bit matrix products that accumulate in float32.
        bfloat16: whether there are units for bfloat16; without them, 16-bit models run in float16.
        float8, int8: dense operations per second; None without units for them.
        board: board with the CPU; None for a GPU in a slot.
    """

    memory: str
    usable: str | None = None
    bandwidth: Rate
    watts: int
    device_class: str
    pcie: str
    float32: Rate
    half: Rate
    bfloat16: bool = True
    float8: Rate | None = None
    int8: Rate | None = None
    board: Board | None = None


class Chip(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chip whose CPU and GPU share one memory.

    Attributes:
        device_class: class of device of the GPU, as for `Gpu`.
        architecture: name of the CPU cores' architecture.
        clock: clock of the CPU cores in Hz.
        cores: number of performance cores of the CPU.
        gpu_cores: number of cores of the GPU.
        largest: the most memory that the chip is sold with, as text with a unit.
        bandwidth: bytes per second of the memory.
        float32, half, float8: FLOP/s of the GPU, as for `Gpu`.
    """

    device_class: str
    architecture: str
    clock: Rate
    cores: int
    gpu_cores: int
    largest: str
    bandwidth: Rate
    float32: Rate
    half: Rate
    float8: Rate | None = None


class Cpu(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CPU in one socket.

    Attributes:
        architecture: name of the cores' architecture.
        cores: number of performance cores.
        clock: base clock in Hz.
        memory: the fastest memory that its vendor supports, such as "DDR5-5200".
        channels: memory channels of 64 bits.
        pcie: generation of its PCIe lanes.
        lanes: PCIe lanes of one socket, for all GPUs together.
        lanes_of_two: PCIe lanes of two sockets together, for all GPUs; None for twice `lanes`. It is less than that
            if some lanes connect the sockets to each other.
    """

    architecture: str
    cores: int
    clock: Rate
    memory: str
    channels: int
    pcie: int
    lanes: int
    lanes_of_two: int | None = None

    def lanes_of(self, sockets: int) -> int:
        """Return the number of PCIe lanes of a board with `sockets` sockets, for all GPUs together."""
        return self.lanes_of_two if sockets == 2 and self.lanes_of_two else sockets * self.lanes


class MemoryType(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A type of memory modules, and the speeds at which the modules are sold, in million transfers per second."""

    slowest: int
    fastest: int


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kind of cores of a CPU.

    Attributes:
        float32, bfloat16: FLOP per cycle of a core; None for bfloat16 if the cores compute it in float32.
        simd: the instruction set that reaches these rates.
    """

    float32: int
    bfloat16: int | None = None
    simd: str
    source: str


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """All parts by name, in the order of the files that list them."""

    gpus: dict[str, Gpu]
    chips: dict[str, Chip]
    cpus: dict[str, Cpu]
    memories: dict[str, MemoryType]
    architectures: dict[str, Architecture]

    @property
    def named(self) -> dict[str, Mapping[str, Part]]:
        """For each option "gpu", "chip" and "cpu" of `moesched machine`, the parts that it accepts, by name."""
        return {"gpu": self.gpus, "chip": self.chips, "cpu": self.cpus}

    def flops(self, part: Cpu | Chip) -> dict[str, float]:
        """Return the FLOP/s of the CPU cores of one socket, by dtype."""
        per_cycle = self.architectures[part.architecture]
        float32 = part.cores * part.clock * per_cycle.float32
        half = part.cores * part.clock * (per_cycle.bfloat16 or per_cycle.float32)
        return {"bfloat16": half, "float16": float32, "float32": float32}


@cache
def library() -> Library:
    """Return the library of parts; its files are read once.

    Raises:
        BadInput: a file of the installation is damaged.
    """
    return Library(
        gpus=_parts("gpus", Gpu),
        chips=_parts("chips", Chip),
        cpus=_parts("cpus", Cpu),
        memories=_parts("memories", MemoryType),
        architectures=convert_profile(
            _tables("cpus")["architectures"], dict[str, Architecture], "architectures", "cpus.toml"
        ),
    )


def gpu_flops(gpu: Gpu | Chip) -> dict[str, float]:
    """Return the FLOP/s of a GPU by dtype."""
    rates = {"bfloat16": gpu.half, "float16": gpu.half, "float32": gpu.float32}
    if gpu.float8 is not None:
        rates["float8"] = gpu.float8
    if isinstance(gpu, Gpu) and gpu.int8 is not None:
        rates["int8"] = gpu.int8
    return rates


def gpu_bytes(gpu: Gpu) -> int:
    """Return the bytes of a GPU's memory, less those for error correction."""
    return parse_bytes(gpu.usable or gpu.memory)


def _parts(kind: str, of: type[PartT]) -> dict[str, PartT]:
    found: dict[str, PartT] = {}
    for name in FILES[kind]:
        for number, series in enumerate(_tables(name)["series"]):
            common = {key: value for key, value in series.items() if key not in ("name", "rows")}
            for row in series["rows"]:
                where = f"series[{number}].{row.get('name', '')}"
                part = convert_profile({"series": series["name"]} | common | row, of, where, f"{name}.toml")
                found[part.name] = part
    return found


@cache
def _tables(name: str) -> dict[str, Any]:
    text = (resources.files("moesched.machines") / "library" / f"{name}.toml").read_bytes()
    return decode_profile(text, "library of parts", f"{name}.toml")
