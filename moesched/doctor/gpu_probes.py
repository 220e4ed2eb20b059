"""Probes of accelerators: CUDA and Metal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moesched.doctor.facts import Facts, MetalFacts
from moesched.doctor.findings import Finding
from moesched.system.cuda import FIRST_WITH_BFLOAT16, CudaFacts, GpuFacts, trouble_of_driver, trouble_of_gpu
from moesched.system.wired import raise_wired_limit
from moesched.units import format_bytes

FULL_SHARE = 0.1
"""Share of a GPU's memory that others may fill: a desktop takes less."""
WIRED_SHARE = 0.6
"""Least share of a Mac's memory that Metal should be allowed to wire; macOS allows two thirds to three quarters."""
LEAST_MACOS = 15
"""The first macOS with residency sets, which keep weights wired."""


def probe_cuda(facts: Facts) -> Iterator[Finding]:
    """Say whether torch can use the NVIDIA GPUs; nothing where there are none and none is asked for."""
    cuda = facts.cuda
    if facts.device == "cuda" or cuda.driver:
        yield _of_driver(cuda)
        for gpu in cuda.gpus:
            yield _of_kernels(gpu, cuda) or _of_memory(gpu)


def _of_driver(cuda: CudaFacts) -> Finding:
    trouble = trouble_of_driver(cuda)
    if trouble:
        return Finding(about="CUDA", says=trouble.says, remedy=trouble.remedy)
    return Finding(
        about="CUDA", says=f"driver for CUDA {cuda.driver}, torch {cuda.torch} for {cuda.built_for}"
    )


def _of_kernels(gpu: GpuFacts, cuda: CudaFacts) -> Finding | None:
    trouble = trouble_of_gpu(gpu, cuda)
    return trouble and Finding(about="GPU", says=trouble.says, remedy=trouble.remedy)


def _of_memory(gpu: GpuFacts) -> Finding:
    of_others = gpu.total - gpu.free - gpu.own
    major, minor = gpu.capability
    if of_others > FULL_SHARE * gpu.total:
        return Finding(
            about="GPU",
            says=f"{gpu.name} has {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free: others fill "
            f"{format_bytes(of_others)}",
            remedy="end the processes that nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )
    half = (
        "" if gpu.capability >= FIRST_WITH_BFLOAT16 else ", no bfloat16: such models are computed in float16"
    )
    return Finding(
        about="GPU",
        says=f"{gpu.name}, compute capability {major}.{minor}{half}, {format_bytes(gpu.free)} of "
        f"{format_bytes(gpu.total)} free",
    )


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def probe_metal(facts: Facts) -> Iterator[Finding]:
    """Say whether MLX can use the GPU of a Mac, and how much memory it may wire there."""
    metal = facts.metal
    if metal is None:
        return
    if metal.problem:
        yield Finding(
            about="MLX", says=f"cannot be loaded: {metal.problem}", remedy="pip install 'moesched[mlx]'"
        )
    elif metal.macos and not metal.metal:
        yield Finding(
            about="MLX",
            says=f"MLX {metal.mlx} sees no GPU here",
            remedy="use Python for arm64, not under Rosetta, on a Mac with Apple silicon",
        )
    elif not metal.metal:
        yield Finding(about="MLX", says=f"MLX {metal.mlx} on the processor, without Metal")
    else:
        yield Finding(about="MLX", says=f"MLX {metal.mlx} on {metal.gpu}, macOS {metal.macos}")
        yield from _of_macos(metal)
        yield from _of_wired_limit(facts, metal)


def _of_macos(metal: MetalFacts) -> Iterator[Finding]:
    if _major(metal.macos) < LEAST_MACOS:
        yield Finding(
            about="macOS",
            says=f"macOS {metal.macos} has no residency sets: idle weights are wired anew",
            remedy=f"update to macOS {LEAST_MACOS}",
        )


def _of_wired_limit(facts: Facts, metal: MetalFacts) -> Iterator[Finding]:
    total, limit = facts.memory.physical, metal.recommended
    if limit is None:
        return
    wanted = max(int(WIRED_SHARE * total), facts.model_bytes if facts.model_bytes < 0.9 * total else 0)
    if limit < wanted:
        yield Finding(
            about="wired limit",
            says=f"Metal may wire {format_bytes(limit)} of {format_bytes(total)}, and needs {format_bytes(wanted)}",
            remedy=raise_wired_limit(max(wanted, int(0.75 * total))),
        )
    else:
        yield Finding(about="wired limit", says=f"{format_bytes(limit)} of {format_bytes(total)}")
