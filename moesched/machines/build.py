"""Builds machines from parts given by name, such as "RTX 3090", and states the source of every figure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moesched.errors import BadInput
from moesched.machines.built_comments import (
    OF_PEAKS,
    cores_comment,
    disk_comment,
    gpu_comment,
    times,
)
from moesched.machines.built_links import (
    RING_COMMENT,
    STAGING_COMMENT,
    gpu_interconnect,
    gpu_links,
    host_copies,
)
from moesched.machines.host_memory import HostMemory, host_memory
from moesched.machines.machine import AcceleratorGroup, Link, Machine, Processor, Roles, Tier
from moesched.machines.part_names import find_chip, find_cpu, find_gpu
from moesched.machines.part_notation import Disk, parse_disk, parse_ram
from moesched.machines.parts import Chip, Cpu, Gpu, gpu_flops, library
from moesched.machines.staging import staged
from moesched.units import format_bytes, format_size, parse_bytes

LAUNCH_SECONDS = 5e-6
APPLE_LAUNCH_SECONDS = 10e-6
DISK_BYTES = 10**12
DISK_BANDWIDTH = 3e9
DISK_LATENCY = 1e-4
DESKTOP_CHANNELS = 2
GPU_RESERVED = 700 * 10**6
"""Bytes of a GPU's memory reserved for driver, context, and libraries' code and workspaces, if it drives no display.

A CUDA context with torch's kernels takes 300 to 400 MB (pytorch/pytorch, issues 20532 and 109888); assumed: about as
much again for workspaces of cuBLAS and what allocators cannot use.
"""
SYSTEM_RESERVED = 4 * 2**30
"""Bytes of the host's memory reserved for system, Python, libraries and other programs: assumed, without a browser."""
MANY_BYTES = 36 * 2**30
"""Bytes of a Mac's memory from which on macOS lets the GPU use three quarters of it by default; below, two thirds.

Apple publishes no rule. Metal reports 10,922.67 MiB of 16 GiB (abetlen/llama-cpp-python, issue 687), 21,845.34 of 32
(ollama/ollama, issue 434) and 49,152 of 64 (ggml-org/llama.cpp, issue 1870); the bound between them is assumed.
"""

GPU_COMMENT = "Reserved, assumed: driver, context and the libraries' workspaces."
SLOTS_COMMENT = (
    "Assumed: a slot of its own for each GPU, and no bridge between them: up one slot and down another."
)
SYSTEM_COMMENT = "Reserved, assumed: the system, Python and other programs."
MAC_COMMENT = (
    "Reserved: what macOS withholds from the GPU by default (Metal's recommendedMaxWorkingSetSize: three quarters of "
    "the memory from 36 GiB on, two thirds below); sysctl iogpu.wired_limit_mb changes it."
)

NO_PARTS = (
    "a machine needs parts: name --gpu and --cpu, --chip, or --cpu alone; `moesched list parts` lists them"
)


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a machine, as its owner names them.

    Attributes:
        gpu: name of the GPU, such as "RTX 3090", or "2x RTX 3090" for two.
        chip: name of a chip whose CPU and GPU share one memory, such as "M2 Ultra".
        cpu: name of the CPU, such as "Ryzen 7950X", or "2x EPYC 7763" for two sockets.
        ram: host memory in the notation of `parse_ram`; with `chip`, its size alone.
        pcie: the GPU's slot, such as "4x16"; by default the fastest that both GPU and CPU have.
        disk: the disk in the notation of `parse_disk`.
        weights: the memory that all weights come from: "host" or "disk". With `gpu`, "host" is the default; without,
            weights always come from "disk".
        pinned: size of the host's memory that can be page-locked; by default all of it.
        name: the machine's name; by default made from the names of its parts.
    """

    gpu: str | None = None
    chip: str | None = None
    cpu: str | None = None
    ram: str | None = None
    pcie: str | None = None
    disk: str | None = None
    weights: str | None = None
    pinned: str | None = None
    name: str | None = None


class BuiltMachine(msgspec.Struct, frozen=True):
    """A machine with the sources of its figures.

    Attributes:
        comments: text on the source of each table in the machine's file, by the table's name, such as "processors.gpu".
        assumed: a sentence on each figure that was assumed, since no part gives it, with the option that sets it.
    """

    machine: Machine
    comments: dict[str, str]
    assumed: list[str]


def build_machine(parts: Parts) -> BuiltMachine:
    """Build a machine from its parts.

    Raises:
        BadInput: a part is not in the library, a notation cannot be read, a part is missing, or two parts cannot be
            combined.
    """
    if parts.weights not in (None, "host", "disk"):
        raise BadInput(f"--weights {parts.weights!r} is no memory that weights come from: write host or disk")
    if parts.chip is not None:
        return _with_chip(parts, find_chip(parts.chip))
    if parts.gpu is not None:
        return _with_gpu(parts, *find_gpu(parts.gpu))
    if parts.cpu is not None:
        return _cpu_only(parts, *find_cpu(parts.cpu))
    raise BadInput(NO_PARTS)


def _with_gpu(parts: Parts, gpu: Gpu, count: int) -> BuiltMachine:
    """Build a machine of a CPU and `count` equal GPUs, each with a memory of its own."""
    name = gpu.board.cpu if parts.cpu is None and gpu.board is not None else parts.cpu
    if name is None:
        raise BadInput(f"--gpu {gpu.name!r} needs the CPU beside it: add, for instance, --cpu 'Ryzen 7950X'")
    cpu, sockets = find_cpu(name)
    host = host_memory(cpu, sockets, parts.ram)
    joint = gpu_links(gpu, count, cpu, sockets, parts.pcie)
    disk = None if parts.disk is None else parse_disk(parts.disk)
    if parts.weights == "disk" and disk is None:
        raise BadInput("--weights disk needs a disk: add, for instance, --disk 7GB/s")
    links = joint.links
    memories = {
        "gpu": Tier(
            capacity=gpu.usable or gpu.memory, bandwidth=gpu.bandwidth, reserved=format_size(GPU_RESERVED)
        ),
        "host": _host_tier(host),
    }
    if disk is not None:
        memories["disk"] = _disk_tier(disk)
        links += [_disk_link(disk, "host"), _disk_link(disk, "gpu")]
    machine = Machine(
        name=parts.name or f"{times(gpu.name, count)}, {times(cpu.name, sockets)}",
        description=f"{times(gpu.name, count)} on {joint.words}, {times(cpu.name, sockets)}, {host.words}",
        accelerator_group=AcceleratorGroup(
            count=count, interconnect=gpu_interconnect(joint.to_gpu, count) if count > 1 else None
        ),
        processors={
            "gpu": Processor(
                memory="gpu",
                flops=gpu_flops(gpu),
                launch_seconds=LAUNCH_SECONDS,
                device_class=gpu.device_class,
            ),
            "cpu": _cpu_processor(cpu, sockets),
        },
        memories=memories,
        links=links,
        roles=Roles(accelerator="gpu", host="cpu", weights=parts.weights or "host"),
        staging=host_copies(host.bandwidth),
    )
    if parts.pinned is not None:
        machine = staged(machine, parts.pinned, option="--pinned ")
    comments = _gpu_comments(parts, gpu, count, disk, joint.comment)
    return _built(machine, comments, cpu, sockets, host, joint.assumed)


def _gpu_comments(parts: Parts, gpu: Gpu, count: int, disk: Disk | None, of_link: str) -> dict[str, str]:
    """Return texts on the sources of the figures of GPUs, disk and links, as the `comments` of a `BuiltMachine`.

    Args:
        count: number of GPUs.
        of_link: text on the source of the rate of the link between host and GPU.
    """
    comments = {
        "processors.gpu": gpu_comment(gpu, count),
        "memories.gpu": f"{gpu.name}: {gpu.memory} at {format_bytes(gpu.bandwidth)}/s; {gpu.source}. {GPU_COMMENT}",
        "staging": STAGING_COMMENT,
        "accelerator_group": RING_COMMENT if count > 1 else SLOTS_COMMENT,
    }
    of_links = {"links.host->gpu": of_link}
    if disk is not None:
        comments["memories.disk"] = disk_comment(disk, parts.disk)
        comments["roles"] = 'Models that do not fit into the host need weights = "disk" (--weights disk).'
        of_links["links.disk"] = (
            "The disk reads into host memory; what stays on the GPU is loaded by way of it. Assumed: 100 us to begin."
        )
    if parts.pinned is not None:
        comments["memories.pinned"] = (
            f"--pinned {parts.pinned}, with the links that the host's memory would have."
        )
        of_links["links.host->pinned"] = comments.pop("staging")
    return comments | of_links


def _cpu_only(parts: Parts, cpu: Cpu, sockets: int) -> BuiltMachine:
    """Build a machine without a GPU: the CPUs in its sockets compute everything, and all weights come from a disk."""
    _refuse(parts, "a machine without --gpu", "pcie", "pinned")
    host = host_memory(cpu, sockets, parts.ram)
    disk, assumed = _unified_disk(parts)
    machine = Machine(
        name=parts.name or times(cpu.name, sockets),
        description=f"{times(cpu.name, sockets)}, {host.words}",
        processors={"cpu": _cpu_processor(cpu, sockets)},
        memories={
            "host": _host_tier(host),
            "disk": _disk_tier(disk),
        },
        links=[_disk_link(disk, "host")],
        roles=Roles(accelerator="cpu", host="cpu", weights="disk"),
    )
    comments = {"memories.disk": disk_comment(disk, parts.disk), "links.disk": "Assumed: 100 us to begin."}
    return _built(machine, comments, cpu, sockets, host, assumed)


def _with_chip(parts: Parts, chip: Chip) -> BuiltMachine:
    """Build a machine of a chip whose CPU and GPU share one memory; all weights come from a disk."""
    _refuse(parts, f"chip {chip.name}", "gpu", "cpu", "pcie", "pinned")
    nbytes = _chip_bytes(parts.ram, chip)
    disk, assumed = _unified_disk(parts)
    apple = chip.device_class == "apple-gpu"
    machine = Machine(
        name=parts.name or f"{chip.name} {format_size(nbytes)}",
        description=f"{chip.name} with {chip.gpu_cores} GPU cores and {format_size(nbytes)}",
        processors={
            "gpu": Processor(
                memory="unified",
                flops=gpu_flops(chip),
                launch_seconds=APPLE_LAUNCH_SECONDS if apple else LAUNCH_SECONDS,
                device_class=chip.device_class,
            ),
            "cpu": Processor(
                memory="unified",
                flops=library().flops(chip),
                launch_seconds=LAUNCH_SECONDS,
                device_class="apple-cpu" if apple else "desktop-cpu",
            ),
        },
        memories={
            "unified": Tier(
                capacity=format_size(nbytes),
                bandwidth=chip.bandwidth,
                reserved=format_size(mac_reserved(nbytes) if apple else SYSTEM_RESERVED),
            ),
            "disk": _disk_tier(disk),
        },
        links=[_disk_link(disk, "unified")],
        roles=Roles(accelerator="gpu", host="cpu", weights="disk"),
    )
    comments = {
        "processors.gpu": f"{chip.name}: {chip.source}. {OF_PEAKS}",
        "processors.cpu": cores_comment(chip, 1),
        "memories.unified": f"--ram {parts.ram}. {format_bytes(chip.bandwidth)}/s: {chip.source}. "
        + (MAC_COMMENT if apple else SYSTEM_COMMENT),
        "memories.disk": disk_comment(disk, parts.disk),
        "links.disk": "Assumed: 100 us to begin.",
    }
    return BuiltMachine(machine, comments, assumed)


def _built(
    machine: Machine,
    comments: dict[str, str],
    cpu: Cpu,
    sockets: int,
    host: HostMemory,
    assumed: Sequence[str] = (),
) -> BuiltMachine:
    """Return the machine with the sources of its figures, and with sentences on the assumed figures.

    Args:
        comments: texts on sources, as in `BuiltMachine`; those on the CPU and on host memory are added here.
        sockets: number of CPU sockets.
        assumed: sentences on assumed figures; those on host memory are added here.
    """
    own = {"processors.cpu": cores_comment(cpu, sockets), "memories.host": f"{host.comment} {SYSTEM_COMMENT}"}
    return BuiltMachine(machine, comments | own, [*host.assumed, *assumed])


def _refuse(parts: Parts, what: str, *names: str) -> None:
    """Refuse options that make no sense for a machine whose weights come from its disk.

    Args:
        what: description of the machine, for the error message.
        names: names of the fields of `parts` that may not be given.

    Raises:
        BadInput: one of the options was given, or weights were to come from host memory.
    """
    for name, value in ((name, getattr(parts, name)) for name in names):
        if value is not None:
            raise BadInput(f"{what} takes no --{name}: leave out --{name} {value!r}")
    if parts.weights == "host":
        raise BadInput(
            f"{what} loads weights from its disk into the memory that computes: leave out --weights host"
        )


def _chip_bytes(ram: str | None, chip: Chip) -> int:
    if ram is None:
        raise BadInput(
            f"chip {chip.name} is sold with up to {chip.largest}: say how much, such as --ram {chip.largest}"
        )
    parsed = parse_ram(ram)
    if parsed.kind or parsed.nbytes is None:
        raise BadInput(
            f"--ram {ram!r}: the memory of {chip.name} has one speed: give its size only, such as --ram {chip.largest}"
        )
    if parsed.nbytes > parse_bytes(chip.largest):
        raise BadInput(f"--ram {ram!r}: {chip.name} is sold with up to {chip.largest}")
    return parsed.nbytes


def _unified_disk(parts: Parts) -> tuple[Disk, list[str]]:
    if parts.disk is not None:
        return parse_disk(parts.disk), []
    return Disk(None, DISK_BANDWIDTH), [
        f"a disk that reads {format_bytes(DISK_BANDWIDTH)}/s: --disk says another rate"
    ]


def mac_reserved(nbytes: int) -> int:
    """Return how many of a Mac's `nbytes` bytes of memory its GPU may not use, by the default limit of macOS."""
    return nbytes // 4 if nbytes >= MANY_BYTES else -(-nbytes // 3)


def _host_tier(host: HostMemory) -> Tier:
    """Return the host's memory.

    Raises:
        BadInput: the system leaves nothing of it to plans.
    """
    if host.nbytes <= SYSTEM_RESERVED:
        raise BadInput(
            f"--ram of {format_size(host.nbytes)}: {format_size(SYSTEM_RESERVED)} are reserved for the system and "
            "other programs: give more"
        )
    return Tier(
        capacity=format_size(host.nbytes), bandwidth=host.bandwidth, reserved=format_size(SYSTEM_RESERVED)
    )


def _disk_tier(disk: Disk) -> Tier:
    return Tier(capacity=format_size(disk.nbytes or DISK_BYTES), bandwidth=disk.bandwidth)


def _disk_link(disk: Disk, memory: str) -> Link:
    return Link(
        source="disk", destination=memory, path="disk", bandwidth=disk.bandwidth, latency=DISK_LATENCY
    )


def _cpu_processor(cpu: Cpu, sockets: int) -> Processor:
    flops = {dtype: sockets * rate for dtype, rate in library().flops(cpu).items()}
    device_class = "desktop-cpu" if cpu.channels <= DESKTOP_CHANNELS else "server-cpu"
    return Processor(memory="host", flops=flops, launch_seconds=LAUNCH_SECONDS, device_class=device_class)
