"""Probes, which judge the facts about accelerators: CUDA and Metal."""

from __future__ import annotations

from collections.abc import Iterator

from moesched.doctor.facts import Facts
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

FULL_SHARE = 0.1
"""Share of a GPU's memory that other programs may fill; a desktop takes less."""
WIRED_SHARE = 0.6
"""The least share of a Mac's memory that Metal should be allowed to wire; macOS allows two thirds to three quarters."""
LEAST_MACOS = 15
"""The first macOS with residency sets, which keep weights wired."""


def probe_cuda(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether torch can use the NVIDIA GPUs; none if there is no GPU and none is asked for."""
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
