"""Describes this machine: its calibrated profile, or the sizes that the system reports, with assumed rates."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines import Link, Machine, Processor, Roles, Tier, parse_machine
from moesched.machines.toml_library import MOST_BYTES
from moesched.system.cache import cache_folder
from moesched.system.cores import usable_cores
from moesched.system.input_file import is_file, read_input
from moesched.system.macos import Ask, chip, output_of
from moesched.system.memory import available_memory, total_memory

ASSUMED_MEMORY_BANDWIDTH = 20e9
APPLE_BANDWIDTHS = {
    "Apple M1": 68e9, "Apple M1 Pro": 200e9, "Apple M1 Max": 400e9, "Apple M1 Ultra": 800e9,
    "Apple M2": 100e9, "Apple M2 Pro": 200e9, "Apple M2 Max": 400e9, "Apple M2 Ultra": 800e9,
    "Apple M3": 100e9, "Apple M3 Pro": 150e9, "Apple M3 Max": 300e9, "Apple M3 Ultra": 819e9,
    "Apple M4": 120e9, "Apple M4 Pro": 273e9, "Apple M4 Max": 410e9,
}  # fmt: skip
"""Bytes per second of memory by chip, from Apple's data sheets; of the slower variant if a chip has two."""
CPUINFO = Path("/proc/cpuinfo")
ASSUMED_DISK_BANDWIDTH = 1e9
ASSUMED_FLOPS_PER_CORE = 50e9


def calibrated_file(device: str = "") -> Path:
    """Return the path of the file that `moesched calibrate` writes by default.

    Args:
        device: name of a GPU's device, such as "cuda"; empty for a calibration without a GPU.
    """
    return cache_folder() / (f"machine-{device}.toml" if device else "machine.toml")


def calibrated_gpu(device: str, gpu: str) -> Machine | None:
    """Return this machine with its GPU, as `moesched calibrate --device` measured it; None if it was not measured.

    A file without a cost table is ignored, since an earlier version measured it in another way.

    Args:
        device: name of the GPU's device, such as "cuda".
        gpu: the GPU's name; a file of another GPU is ignored.

    Raises:
        BadInput: the file is broken.
    """
    file = calibrated_file(device)
    if not is_file(file):
        return None
    machine = parse_machine(read_input(file, "machine", MOST_BYTES), str(file))
    return machine if machine.cost_table and machine.measured_on.endswith(f", {gpu}") else None


def local_machine() -> Machine:
    """Return this machine's calibrated profile; without one, a profile with assumed rates.

    The host's memory is at most what processes can have now, since a control group may limit it more than at the time
    of the calibration.

    Raises:
        BadInput: the calibrated profile is broken or of an older version.
    """
    file = calibrated_file()
    if not is_file(file):
        return assumed_machine()
    machine = parse_machine(read_input(file, "machine", MOST_BYTES), str(file))
    host, most = machine.memories[machine.host.memory], total_memory()
    if host.nbytes <= most:
        return machine
    return replace(machine, memories=machine.memories | {machine.host.memory: replace(host, capacity=most)})


def assumed_machine() -> Machine:
    """Return a profile of this machine's memory and disk sizes, with assumed rates."""
    flops = ASSUMED_FLOPS_PER_CORE * usable_cores()
    return unified_machine(
        platform.node() or "local",
        memory=available_memory(),
        disk=shutil.disk_usage(Path.cwd()).total,
        flops={"float32": flops, "bfloat16": flops, "float16": flops},
        memory_bandwidth=APPLE_BANDWIDTHS.get(processor_name(), ASSUMED_MEMORY_BANDWIDTH),
        disk_bandwidth=ASSUMED_DISK_BANDWIDTH,
        description="not calibrated: its rates are assumed; `moesched calibrate` measures them",
    )


def unified_machine(
    name: str,
    *,
    memory: int,
    disk: int,
    flops: dict[str, float],
    memory_bandwidth: float,
    disk_bandwidth: float,
    description: str = "",
) -> Machine:
    """Make a machine of a CPU, which is both its accelerator and its host; weights come from the disk.

    Args:
        memory, disk: sizes in bytes.
        flops: FLOP/s of the CPU by dtype.
        memory_bandwidth, disk_bandwidth: bytes per second.
    """
    return Machine(
        name=name,
        description=description,
        processors={"cpu": Processor(memory="host", flops=flops)},
        memories={
            "host": Tier(capacity=memory, bandwidth=memory_bandwidth),
            "disk": Tier(capacity=disk, bandwidth=disk_bandwidth),
        },
        links=[Link(source="disk", destination="host", bandwidth=disk_bandwidth)],
        roles=Roles(accelerator="cpu", host="cpu", weights="disk"),
    )


def require_measured_on(machine: Machine, processors: Callable[[], str]) -> None:
    """Refuse a machine description whose costs were measured on other processors than this machine's.

    Args:
        processors: a function that returns the names of this machine's processors; called only if costs were measured.

    Raises:
        BadInput: the costs were measured on other processors.
    """
    if machine.measured_on and machine.measured_on != (here := processors()):
        raise BadInput(
            f"machine {machine.name} was measured on {machine.measured_on}, and this is {here}: "
            "run `moesched calibrate`, or give --foreign-machine to use its costs anyway"
        )


def this_processor() -> str:
    """Return the name of this machine's processor, followed by the number of usable cores."""
    return f"{processor_name()}, {usable_cores()} cores"


def processor_with(gpu: str) -> str:
    """Return the name of this machine's processor, the number of usable cores, and the GPU's name, as one text."""
    return f"{this_processor()}, {gpu}"


def processor_name(cpuinfo: Path = CPUINFO, ask: Ask = output_of) -> str:
    """Return the name of this machine's processor; on Arm Linux the numbers of its maker and design.

    Args:
        cpuinfo: path of the file in which Linux describes the processor.
        ask: a function that runs a command and returns its output.
    """
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" in facts:
        return facts["model name"]
    if {"CPU implementer", "CPU part"} <= facts.keys():
        return f"Arm processor {facts['CPU implementer']} {facts['CPU part']}"
    return chip(ask) or platform.processor() or platform.machine()
