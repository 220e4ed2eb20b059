"""Probes of the host: processor, kernels, cores, memory, folders and clock."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import Facts, FolderFacts
from moesched.doctor.findings import Finding
from moesched.units import format_bytes

LEAST_AVAILABLE = 2 * 10**9
"""Bytes of memory that Python, torch and a small model need with room to spare."""
LEAST_ADDRESS_SPACE = 8 * 10**9
"""Bytes that a process should be able to map: threads and libraries map much more than they use."""
LEAST_FREE = 10**9
"""Bytes of the disk that calibrations, traces and reports can fill."""
LOCKED_WANTED = 2**30
"""Bytes of page-locked buffers that a run of a large model uses."""
COARSEST_STEP = 10_000
"""Nanoseconds; short kernels take ten times as long."""

X86_SETS = {
    "amx_bf16": {"amx_bf16", "amx_tile", "avx512_bf16"},
    "avx512_bf16": {"avx512_bf16", "avx512f", "avx512vl", "avx512bw"},
    "avx512": {"avx512f", "avx512vl", "avx512bw", "avx2", "fma"},
    "avx2": {"avx2", "fma"},
}
"""Instruction sets of the kernels, best first, and the processor's features that each needs."""


def probe_processor(facts: Facts) -> Iterator[Finding]:
    """Say whether the processor has the instructions that the CPU kernels are written for."""
    processor = facts.processor
    if processor.architecture in ("x86_64", "AMD64") and processor.flags and _best_set(processor.flags) == "":
        yield Finding(
            about="processor",
            says=f"{processor.name} has no AVX2: kernels on the CPU will be several times slower",
            remedy="use a processor from 2015 or later, or a virtual machine that passes its CPU through",
        )
    else:
        yield Finding(about="processor", says=f"{processor.name}, {processor.architecture}")


def probe_kernels(facts: Facts) -> Iterator[Finding]:
    """Say whether the compiled kernels can be used, with all instructions that the processor has."""
    kernels, best = facts.kernels, _best_set(facts.processor.flags)
    if kernels.problem:
        yield Finding(
            about="CPU kernels",
            says=f"cannot be used, torch does without: {kernels.problem}",
            remedy="install GCC or Clang, then moesched again",
        )
    elif best and best not in kernels.sets:
        here = kernels.sets[0] if kernels.sets else "none"
        yield Finding(
            about="CPU kernels",
            says=f"use {here}, and the processor has {best}: the compiler or the system does not support it",
            remedy="install moesched again with GCC 11 or later, on Linux 5.16 or later",
        )
    else:
        yield Finding(about="CPU kernels", says=f"use {', '.join(kernels.sets[:1])}")


def _best_set(flags: list[str]) -> str:
    """The best instruction set of x86 that a processor with these features has; empty for none."""
    return next((name for name, needed in X86_SETS.items() if needed <= set(flags)), "")


def probe_cores(facts: Facts) -> Iterator[Finding]:
    """Say how many cores there are, and whether a quota gives the time of fewer."""
    cores, quota = facts.cores.cores, facts.cores.quota
    if quota is not None and quota < cores:
        yield Finding(
            about="cores",
            says=f"{cores} cores, and a CPU quota gives the time of {quota}: threads will be paused",
            remedy=f"raise the quota of the control group (docker --cpus {cores}), or expect the speed of {quota}",
        )
    else:
        yield Finding(about="cores", says=f"{cores} usable")


def probe_memory(facts: Facts) -> Iterator[Finding]:
    """Say how much memory there is, and whether a limit leaves too little."""
    memory = facts.memory
    limited = memory.limit < memory.physical
    if limited and memory.available < LEAST_AVAILABLE:
        yield Finding(
            about="memory",
            says=f"a control group allows {format_bytes(memory.limit)} of {format_bytes(memory.physical)}, and "
            f"{format_bytes(memory.available)} are left",
            remedy="raise its limit (docker --memory, systemd MemoryMax), or end other processes in it",
        )
    elif memory.available < LEAST_AVAILABLE:
        yield Finding(
            about="memory",
            says=f"{format_bytes(memory.available)} of {format_bytes(memory.limit)} are free",
            remedy=f"end other programs: runs need {format_bytes(LEAST_AVAILABLE)}",
        )
    else:
        within = f", of {format_bytes(memory.physical)} in the machine" if limited else ""
        yield Finding(
            about="memory",
            says=f"{format_bytes(memory.available)} of {format_bytes(memory.limit)} are free{within}",
        )
    if memory.address_space is not None and memory.address_space < LEAST_ADDRESS_SPACE:
        yield Finding(
            about="address space",
            says=f"a process may map {format_bytes(memory.address_space)}",
            remedy="raise the limit: ulimit -v unlimited",
        )


def probe_locked_memory(facts: Facts) -> Iterator[Finding]:
    """Say whether CUDA locks as much of the host's memory as the buffers take that a GPU copies from.

    `ulimit -l` says nothing about it: memory that CUDA locks does not count against that limit.
    """
    lockable = facts.cuda.lockable
    if lockable is None:
        return
    if lockable < LOCKED_WANTED:
        yield Finding(
            about="locked memory",
            says=f"CUDA locks {format_bytes(lockable)} of the host's memory, and not {format_bytes(LOCKED_WANTED)}: "
            "copies to the GPU are slow, or runs are refused",
            remedy="give the container (docker --memory) or WSL (memory in .wslconfig) more memory, or end other "
            "programs",
        )
    else:
        yield Finding(about="locked memory", says=f"CUDA locks {format_bytes(LOCKED_WANTED)} and more")


def probe_mapped_files(facts: Facts) -> Iterator[Finding]:
    """Say whether a GPU copies weights from the page cache, so that they are neither loaded nor copied in memory."""
    refusal = facts.cuda.mapping
    if refusal:
        reason, _, remedy = refusal.rpartition(": ")
        yield Finding(
            about="mapped files",
            says=f"weights are loaded into memory before they go to the GPU: {reason}",
            remedy=remedy,
        )
    elif refusal is not None:
        yield Finding(about="mapped files", says="the GPU copies weights from the page cache")


def probe_folders(facts: Facts) -> Iterator[Finding]:
    """Say whether the cache's and the model's folder can be used, have room, and can be read directly."""
    for folder in facts.folders:
        yield from _of_folder(folder)


def _of_folder(folder: FolderFacts) -> Iterator[Finding]:
    about = f"{folder.role} folder"
    if folder.problem:
        remedy = "set MOESCHED_CACHE to a folder that you can write to"
        if folder.role == "model":
            remedy = f"let yourself read it (chmod -R u+rX {folder.path}), or copy it"
        yield Finding(about=about, says=f"{folder.path} cannot be used: {folder.problem}", remedy=remedy)
        return
    if folder.role == "cache" and folder.free < LEAST_FREE:
        yield Finding(
            about=about,
            says=f"{folder.path} has {format_bytes(folder.free)} of free disk space left",
            remedy=f"free {format_bytes(LEAST_FREE)}, or set MOESCHED_CACHE to a folder of another disk",
        )
    elif folder.caching != "bypassed":
        yield Finding(
            about=about,
            says=f"{folder.path} has no direct reads: weights pass through the page cache, and rates of the disk are "
            "those of memory",
            remedy="use a file system with O_DIRECT (ext4, xfs, btrfs; no tmpfs, no network share)",
        )
    else:
        yield Finding(about=about, says=f"{folder.path}, {format_bytes(folder.free)} free, direct reads")


def probe_clock(facts: Facts) -> Iterator[Finding]:
    """Say whether the clock is fine enough to measure single tasks."""
    clock = facts.clock
    if not clock.monotonic or clock.step > COARSEST_STEP:
        fault = f"steps of {clock.step / 1000:.0f} µs" if clock.monotonic else "it can go back"
        yield Finding(
            about="clock",
            says=f"too coarse for single tasks: {fault}" if clock.monotonic else f"not monotonic: {fault}",
            remedy="choose the source tsc: clocksource=tsc among the options of the kernel",
        )
    else:
        yield Finding(about="clock", says=f"monotonic, steps of {clock.step} ns")
