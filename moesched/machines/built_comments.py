"""Writes comments for the file of a machine built from parts; they state the sources of its figures."""

from __future__ import annotations

from moesched.machines.part_notation import Disk
from moesched.machines.parts import Chip, Cpu, Gpu, library
from moesched.units import format_bytes

OF_PEAKS = "These are peaks: device_class says what kernels sustain. launch_seconds is assumed."
NO_BFLOAT16 = "It has no bfloat16 units; assumed: 16-bit models run in float16 at the same rate."


def gpu_comment(gpu: Gpu, count: int) -> str:
    """Return the text on the source of the rates of `count` GPUs, for a comment in the machine's file."""
    each = "each " if count > 1 else ""
    sixteen = "" if gpu.bfloat16 else f" {NO_BFLOAT16}"
    return f"{gpu.name}, {each}{gpu.watts} W: {gpu.source}.{sixteen} {OF_PEAKS}"


def cores_comment(cpu: Cpu | Chip, sockets: int) -> str:
    """Return the text on the source of the rates of `sockets` CPUs' cores, for a comment in the machine's file."""
    per_cycle = library().architectures[cpu.architecture]
    bfloat16 = f", {per_cycle.bfloat16} in bfloat16" if per_cycle.bfloat16 else ""
    cores = f"{times(f'{cpu.cores} cores', sockets)} at {cpu.clock / 1e9:g} GHz"
    return (
        f"{cpu.name}, {cores}: {cpu.source}. {per_cycle.simd}: "
        f"{per_cycle.float32} float32 FLOP per cycle{bfloat16} ({per_cycle.source}). "
        f"Other dtypes are computed in float32. {OF_PEAKS}"
    )


def disk_comment(disk: Disk, given: str | None) -> str:
    """Return the text on the source of a disk's rate and size, for a comment in the machine's file.

    Args:
        given: the disk as its owner described it; None if rate and size are assumed.
    """
    size = "" if disk.nbytes else " Assumed: 1 TB."
    return (
        f"--disk {given}.{size}"
        if given
        else f"Assumed: an NVMe disk, {format_bytes(disk.bandwidth)}/s, 1 TB."
    )


def times(name: str, count: int) -> str:
    """Return a part's name with the number of parts, such as "2x RTX 3090"; the name alone if the number is 1."""
    return f"{count}x {name}" if count > 1 else name
