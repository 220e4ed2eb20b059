"""Probes of the host: processor, kernels, cores, memory, folders and clock."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import Facts, FolderFacts
from moesched.doctor.findings import Finding, finding

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
    is_x86 = processor.architecture in ("x86_64", "AMD64") and processor.flags
    old = is_x86 and _best_set(processor.flags) == ""
    yield finding("processor-without-avx2" if old else "processor", processor=processor)


def probe_kernels(facts: Facts) -> Iterator[Finding]:
    """Say whether the compiled kernels can be used, with all instructions that the processor has."""
    kernels, best = facts.kernels, _best_set(facts.processor.flags)
    if kernels.problem:
        yield finding("kernels-unusable", problem=kernels.problem)
    elif best and best not in kernels.sets:
        yield finding("kernels-behind", used=kernels.sets[0] if kernels.sets else "none", best=best)
    else:
        yield finding("kernels", used=", ".join(kernels.sets[:1]))


def _best_set(flags: list[str]) -> str:
    """The best instruction set of x86 that a processor with these features has; empty for none."""
    return next((name for name, needed in X86_SETS.items() if needed <= set(flags)), "")


def probe_cores(facts: Facts) -> Iterator[Finding]:
    """Say how many cores there are, and whether a quota gives the time of fewer."""
    cores, quota = facts.cores.cores, facts.cores.quota
    limited = quota is not None and quota < cores
    yield finding("cores-under-quota" if limited else "cores", cores=cores, quota=quota)


def probe_memory(facts: Facts) -> Iterator[Finding]:
    """Say how much memory there is, and whether a limit leaves too little."""
    memory = facts.memory
    limited = "-limited" if memory.limit < memory.physical else ""
    scarce = "-scarce" if memory.available < LEAST_AVAILABLE else ""
    yield finding(f"memory{limited}{scarce}", memory=memory, least=LEAST_AVAILABLE)
    if memory.address_space is not None and memory.address_space < LEAST_ADDRESS_SPACE:
        yield finding("address-space", memory=memory)


def probe_locked_memory(facts: Facts) -> Iterator[Finding]:
    """Say whether CUDA locks as much of the host's memory as the buffers take that a GPU copies from.

    `ulimit -l` says nothing about it: memory that CUDA locks does not count against that limit.
    """
    lockable = facts.cuda.lockable
    if lockable is not None:
        name = "locked-too-little" if lockable < LOCKED_WANTED else "locked"
        yield finding(name, lockable=lockable, wanted=LOCKED_WANTED)


def probe_mapped_files(facts: Facts) -> Iterator[Finding]:
    """Say whether a GPU copies weights from the page cache, so that they are neither loaded nor copied in memory."""
    refusal = facts.cuda.mapping
    if refusal:
        reason, _, remedy = refusal.rpartition(": ")
        yield finding("mapped-refused", reason=reason, remedy=remedy)
    elif refusal is not None:
        yield finding("mapped")


def probe_folders(facts: Facts) -> Iterator[Finding]:
    """Say whether the cache's and the model's folder can be used, have room, and can be read directly."""
    for folder in facts.folders:
        yield finding(_state_of(folder), folder=folder, least=LEAST_FREE)


def _state_of(folder: FolderFacts) -> str:
    """The name of what is found."""
    if folder.problem:
        return "model-unusable" if folder.role == "model" else "folder-unusable"
    if folder.role == "cache" and folder.free < LEAST_FREE:
        return "folder-full"
    return "folder" if folder.caching == "bypassed" else "folder-cached"


def probe_clock(facts: Facts) -> Iterator[Finding]:
    """Say whether the clock is fine enough to measure single tasks."""
    clock = facts.clock
    if not clock.monotonic:
        yield finding("clock-goes-back")
    elif clock.step > COARSEST_STEP:
        yield finding("clock-coarse", microseconds=clock.step / 1000)
    else:
        yield finding("clock", clock=clock)
