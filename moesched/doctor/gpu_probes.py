"""Probes of accelerators: CUDA and Metal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moesched.doctor.facts import CudaFacts, Facts, GpuFacts, MetalFacts
from moesched.doctor.findings import Finding
from moesched.system.wired import raise_wired_limit
from moesched.units import format_bytes

FULL_SHARE = 0.1
"""Share of a GPU's memory that others may fill: a desktop takes less."""
WIRED_SHARE = 0.6
"""Least share of a Mac's memory that Metal should be allowed to wire; macOS allows two thirds to three quarters."""
FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability from which on GPUs have bfloat16; earlier ones have float16 only, or imitate bfloat16 slowly."""
LEAST_MACOS = 15
"""The first macOS with residency sets, which keep weights wired."""


def probe_cuda(facts: Facts) -> Iterator[Finding]:
    """Say whether torch can use the NVIDIA GPUs; nothing where there are none and none is asked for."""
    cuda = facts.cuda
    if facts.device == "cuda" or cuda.driver:
        yield of_driver(cuda)
        for gpu in cuda.gpus:
            yield of_kernels(gpu, cuda) or _of_memory(gpu)


def of_driver(cuda: CudaFacts) -> Finding:
    """Say whether driver and torch fit each other, and torch sees a GPU."""
    if not cuda.driver:
        return Finding(
            about="CUDA",
            says="there is no NVIDIA driver",
            remedy="install the driver (in a container: start it with --gpus all)",
        )
    if not cuda.built_for:
        return Finding(
            about="CUDA",
            says=f"torch {cuda.torch} was built without CUDA, and there is a driver for CUDA {cuda.driver}",
            remedy="install a build for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu…",
        )
    if _major(cuda.driver) < _major(cuda.built_for):
        return Finding(
            about="CUDA",
            says=f"the driver supports CUDA {cuda.driver}, and torch {cuda.torch} was built for {cuda.built_for}",
            remedy=f"update the NVIDIA driver, or install a torch that was built for CUDA {_major(cuda.driver)}",
        )
    if not cuda.gpus:
        because = f": {cuda.problem}" if cuda.problem else ""
        return Finding(
            about="CUDA",
            says=f"torch sees no GPU{because}",
            remedy="check nvidia-smi, and unset CUDA_VISIBLE_DEVICES or name a GPU there",
        )
    return Finding(
        about="CUDA", says=f"driver for CUDA {cuda.driver}, torch {cuda.torch} for {cuda.built_for}"
    )


def of_kernels(gpu: GpuFacts, cuda: CudaFacts) -> Finding | None:
    """Say whether torch has no kernels for a GPU; None where it has."""
    major, minor = gpu.capability
    if has_kernels(gpu.capability, cuda.kernels_for):
        return None
    return Finding(
        about="GPU",
        says=f"{gpu.name} has compute capability {major}.{minor}, and torch {cuda.torch} has kernels for "
        f"{', '.join(cuda.kernels_for) or 'none'}",
        remedy=f"install a torch with sm_{major}{minor}: an older one for old GPUs, a newer one for new GPUs",
    )


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


def has_kernels(capability: tuple[int, int], kernels_for: list[str]) -> bool:
    """Whether kernels for these architectures run on a GPU.

    Binaries ("sm_80") run on GPUs of the same major version and the same or a later minor one; those with a letter
    ("sm_90a") only on exactly that one. Code that the driver compiles ("compute_80") runs on all later ones.
    """
    for each in kernels_for:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", each)
        if found is None:
            continue
        kind, of, letter = found[1], (int(found[2]), int(found[3])), found[4]
        if of == capability or (kind == "compute" and not letter and of < capability):
            return True
        if letter != "a" and of[0] == capability[0] and of < capability:
            return True
    return False


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
