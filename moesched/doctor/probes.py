"""Probes: they judge the facts about a machine's host, its accelerators, and the cluster that is started from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moesched.doctor.facts import NO_ANSWER, Facts, FolderFacts, SshFacts
from moesched.doctor.findings import Finding, finding
from moesched.system.cuda import (
    FIRST_WITH_BFLOAT16,
    CudaFacts,
    GpuFacts,
    major_version,
    trouble_of_driver,
    trouble_of_gpu,
)
from moesched.system.macos import raise_wired_limit

LEAST_AVAILABLE = 2 * 10**9
"""Bytes of memory that are enough for Python, torch and a small model."""
LEAST_ADDRESS_SPACE = 8 * 10**9
"""Bytes that a process should be able to map: threads and libraries map much more than they use."""
LEAST_FREE = 10**9
"""Bytes of disk that calibrations, traces and reports may take."""
LOCKED_WANTED = 2**30
"""Bytes of page-locked buffers that a run of a large model uses."""
COARSEST_STEP = 10_000
"""The largest acceptable step of a clock, in nanoseconds; short kernels take ten times as long."""

X86_SETS = {
    "amx_bf16": {"amx_bf16", "amx_int8", "amx_tile", "avx512_bf16"},
    "avx512_bf16": {"avx512_bf16", "avx512f", "avx512vl", "avx512bw"},
    "avx512": {"avx512f", "avx512vl", "avx512bw", "avx2", "fma"},
    "avx2": {"avx2", "fma"},
}
"""The processor's features that each instruction set of the kernels needs, by the set's name, best set first."""
FULL_SHARE = 0.1
"""Share of a GPU's memory that other programs may fill; a desktop takes less."""
WIRED_SHARE = 0.6
"""The least share of a Mac's memory that Metal should be allowed to wire; macOS allows two thirds to three quarters."""
LEAST_MACOS = 15
"""The first macOS with residency sets, which keep weights wired."""
SSH_PROBLEMS = {
    "ssh-password": ("permission denied", "authentication"),
    "ssh-question": ("host key verification",),
    "ssh-no-address": ("could not resolve", "name or service", "nodename nor servname"),
    "ssh-no-server": ("connection refused",),
    "ssh-silent": ("timed out", "no route", "unreachable", NO_ANSWER),
}
"""Words in ssh's error messages, in lower case, by the name of the finding that they lead to."""


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
    """Yield a finding for each folder of cache and model: whether it can be used, and is read past the page cache.

    The folder of the cache must also have enough room.
    """
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


def probe_cuda(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether torch can use NVIDIA GPUs, if there is a driver for them or the device is "cuda"."""
    cuda = facts.cuda
    if facts.device == "cuda" or cuda.driver:
        trouble = trouble_of_driver(cuda)
        yield finding("cuda-trouble" if trouble else "cuda", trouble=trouble, cuda=cuda)
        for gpu in cuda.gpus:
            yield _of_gpu(gpu, cuda)


def _of_gpu(gpu: GpuFacts, cuda: CudaFacts) -> Finding:
    if trouble := trouble_of_gpu(gpu, cuda):
        return finding("gpu-trouble", trouble=trouble)
    of_others = gpu.total - gpu.free - gpu.own
    if of_others > FULL_SHARE * gpu.total:
        return finding("gpu-full", gpu=gpu, of_others=of_others)
    major, minor = gpu.capability
    name = "gpu" if gpu.capability >= FIRST_WITH_BFLOAT16 else "gpu-without-bfloat16"
    return finding(name, gpu=gpu, major=major, minor=minor)


def probe_metal(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether MLX can use the GPU of a Mac, and how much memory it may wire."""
    metal = facts.metal
    if metal is None:
        return
    if metal.problem:
        yield finding("mlx-unusable", metal=metal)
    elif not metal.metal:
        yield finding("mlx-without-gpu" if metal.macos else "mlx-on-processor", metal=metal)
    else:
        yield finding("mlx", metal=metal)
        if major_version(metal.macos) < LEAST_MACOS:
            yield finding("macos-old", metal=metal, least=LEAST_MACOS)
        if metal.recommended is not None:
            yield _of_wired_limit(facts, metal.recommended)


def _of_wired_limit(facts: Facts, limit: int) -> Finding:
    total = facts.memory.physical
    wanted = max(int(WIRED_SHARE * total), facts.model_bytes if facts.model_bytes < 0.9 * total else 0)
    if limit >= wanted:
        return finding("wired", limit=limit, total=total)
    raised = raise_wired_limit(max(wanted, int(0.75 * total)))
    return finding("wired-too-little", limit=limit, total=total, wanted=wanted, raised=raised)


def probe_cluster(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether this machine can start the nodes of a cluster file, if given, and reach their ports."""
    cluster = facts.cluster
    if cluster is None:
        return
    if cluster.ssh:
        for node in cluster.nodes:
            yield _of_node(node, cluster.version)
    else:
        yield finding("ssh-missing")
    for port in cluster.ports:
        yield finding(f"port-{port.state}", port=port)


def _of_node(node: SshFacts, here: str) -> Finding:
    if node.problem:
        said = node.problem.lower()
        known = (name for name, words in SSH_PROBLEMS.items() if any(word in said for word in words))
        return finding(next(known, "ssh-unreached"), node=node)
    if node.failure:
        return finding("node-fails", node=node)
    if not node.version:
        return finding("node-without-command", node=node)
    return finding("ssh" if node.version == here else "node-of-another-version", node=node, here=here)


PROBES: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    probe_processor,
    probe_kernels,
    probe_cores,
    probe_memory,
    probe_locked_memory,
    probe_mapped_files,
    probe_folders,
    probe_clock,
    probe_cuda,
    probe_metal,
    probe_cluster,
)
"""All probes, in the order of their findings."""
