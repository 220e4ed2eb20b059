"""Probes, which judge the facts about the host: processor, kernels, cores, memory, folders and clock."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import Facts, FolderFacts
from moesched.doctor.findings import Finding, finding

LEAST_AVAILABLE = 2 * 10**9
"""Bytes of memory that are enough for Python, torch and a small model."""
LEAST_ADDRESS_SPACE = 8 * 10**9
"""Bytes that a process should be able to map: threads and libraries map much more than they use."""
LEAST_FREE = 10**9
"""Bytes of disk that calibrations, traces and reports may take."""
LOCKED_WANTED = 2**30
"""Bytes of page-locked buffers that a run of a large model uses."""
COARSEST_STEP = 10_000
"""The largest good step of a clock, in nanoseconds; short kernels take ten times as long."""

X86_SETS = {
    "amx_bf16": {"amx_bf16", "amx_int8", "amx_tile", "avx512_bf16"},
    "avx512_bf16": {"avx512_bf16", "avx512f", "avx512vl", "avx512bw"},
    "avx512": {"avx512f", "avx512vl", "avx512bw", "avx2", "fma"},
    "avx2": {"avx2", "fma"},
}
"""The processor's features that each instruction set of the kernels needs, by the set's name, best set first."""


def probe_processor(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether the processor has the instructions that the CPU kernels are written for."""
    processor = facts.processor
    is_x86 = processor.architecture in ("x86_64", "AMD64") and processor.flags
    old = is_x86 and _best_set(processor.flags) == ""
    yield finding("processor-without-avx2" if old else "processor", processor=processor)


def probe_kernels(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether the compiled kernels can be used, and use the processor's best instructions."""
    kernels, best = facts.kernels, _best_set(facts.processor.flags)
    if kernels.problem:
        yield finding("kernels-unusable", problem=kernels.problem)
    elif best and best not in kernels.sets:
        yield finding("kernels-behind", used=kernels.sets[0] if kernels.sets else "none", best=best)
    else:
        yield finding("kernels", used=", ".join(kernels.sets[:1]))


def _best_set(flags: list[str]) -> str:
    """Return the best x86 instruction set that a processor with these features supports; empty if it supports none.

    Args:
        flags: names of the processor's features, as Linux lists them.
    """
    return next((name for name, needed in X86_SETS.items() if needed <= set(flags)), "")


def probe_cores(facts: Facts) -> Iterator[Finding]:
    """Yield a finding on the number of cores, and on a CPU quota that is smaller than this number."""
    cores, quota = facts.cores.cores, facts.cores.quota
    limited = quota is not None and quota < cores
    yield finding("cores-under-quota" if limited else "cores", cores=cores, quota=quota)


def probe_memory(facts: Facts) -> Iterator[Finding]:
    """Yield findings on the size of memory, and on limits of memory or address space that are too low."""
    memory = facts.memory
    limited = "-limited" if memory.limit < memory.physical else ""
    scarce = "-scarce" if memory.available < LEAST_AVAILABLE else ""
    yield finding(f"memory{limited}{scarce}", memory=memory, least=LEAST_AVAILABLE)
    if memory.address_space is not None and memory.address_space < LEAST_ADDRESS_SPACE:
        yield finding("address-space", memory=memory)


def probe_locked_memory(facts: Facts) -> Iterator[Finding]:
    """Yield a finding on whether CUDA can lock enough host memory for the buffers from which a GPU copies.

    The limit of `ulimit -l` does not matter: memory that CUDA locks does not count against this limit.
    """
    lockable = facts.cuda.lockable
    if lockable is not None:
        name = "locked-too-little" if lockable < LOCKED_WANTED else "locked"
        yield finding(name, lockable=lockable, wanted=LOCKED_WANTED)


def probe_mapped_files(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether a GPU can copy weights from the page cache, without a copy in the process's memory."""
    refusal = facts.cuda.mapping
    if refusal:
        reason, _, remedy = refusal.rpartition(": ")
        yield finding("mapped-refused", reason=reason, remedy=remedy)
    elif refusal is not None:
        yield finding("mapped")


def probe_folders(facts: Facts) -> Iterator[Finding]:
    """Yield findings on the folders of cache and model: usable, with room, and readable without the page cache."""
    for folder in facts.folders:
        yield finding(_state_of(folder), folder=folder, least=LEAST_FREE)


def _state_of(folder: FolderFacts) -> str:
    """Return the name in findings.toml of the finding for a folder in this state."""
    if folder.problem:
        return "model-unusable" if folder.role == "model" else "folder-unusable"
    if folder.role == "cache" and folder.free < LEAST_FREE:
        return "folder-full"
    return "folder" if folder.caching == "bypassed" else "folder-cached"


def probe_clock(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether the clock is fine enough to measure single tasks."""
    clock = facts.clock
    if not clock.monotonic:
        yield finding("clock-goes-back")
    elif clock.step > COARSEST_STEP:
        yield finding("clock-coarse", microseconds=clock.step / 1000)
    else:
        yield finding("clock", clock=clock)
