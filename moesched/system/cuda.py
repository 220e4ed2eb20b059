"""Facts about CUDA as torch and the driver tell them, and the reasons why torch cannot use CUDA. Sizes are in bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability from which on GPUs have bfloat16; earlier ones have float16 only, or imitate bfloat16 slowly."""


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a CUDA GPU.

    Attributes:
        capability: compute capability, such as (8, 0).
        total, free: bytes of the GPU's memory, and the bytes that no process has allocated.
        own: bytes that this process has allocated.
    """

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    own: int = 0


class CudaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about CUDA on this machine.

    Attributes:
        torch: torch's version.
        built_for: version of CUDA that torch was built for, such as "12.4"; empty for a build without CUDA.
        driver: version of CUDA that the driver supports, such as "12.2"; empty without a driver.
        kernels_for: architectures that torch has kernels for, such as "sm_80".
        problem: torch's reason for not using CUDA; empty where it gives none.
        gpus: the GPUs that torch can use.
        peak: the largest number of bytes that this process had allocated at one time on the first GPU.
        lockable: bytes of the host's memory that CUDA could lock in a trial; None without a trial.
        mapping: the reason why CUDA cannot page-lock files that are mapped into memory, with the remedy; empty if it
            can, None without a trial.
    """

    torch: str
    built_for: str
    driver: str
    kernels_for: list[str]
    gpus: list[GpuFacts]
    problem: str = ""
    peak: int = 0
    lockable: int | None = None
    mapping: str | None = None


class Trouble(NamedTuple):
    """A fault of the system's set-up.

    Attributes:
        says: what does not work and why, in a line.
        remedy: what the user can do about it.
    """

    says: str
    remedy: str


def trouble_of_driver(cuda: CudaFacts) -> Trouble | None:
    """Return why torch can use no GPU, or why the driver does not fit torch; None if all is well."""
    if not cuda.driver:
        return Trouble(
            "there is no NVIDIA driver", "install the driver (in a container: start it with --gpus all)"
        )
    if not cuda.built_for:
        return Trouble(
            f"torch {cuda.torch} was built without CUDA, and there is a driver for CUDA {cuda.driver}",
            "install a build for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu…",
        )
    if major_version(cuda.driver) < major_version(cuda.built_for):
        return Trouble(
            f"the driver supports CUDA {cuda.driver}, and torch {cuda.torch} was built for {cuda.built_for}",
            f"update the NVIDIA driver, or install a torch that was built for CUDA {major_version(cuda.driver)}",
        )
    if not cuda.gpus:
        because = f": {cuda.problem}" if cuda.problem else ""
        return Trouble(
            f"torch sees no GPU{because}",
            "check nvidia-smi, and unset CUDA_VISIBLE_DEVICES or name a GPU there",
        )
    return None


def trouble_of_gpu(gpu: GpuFacts, cuda: CudaFacts) -> Trouble | None:
    """Return why torch has no kernels for a GPU that torch sees; None if torch has kernels."""
    major, minor = gpu.capability
    if has_kernels(gpu.capability, cuda.kernels_for):
        return None
    return Trouble(
        f"{gpu.name} has compute capability {major}.{minor}, and torch {cuda.torch} has kernels for "
        f"{', '.join(cuda.kernels_for) or 'none'}",
        f"install a torch with sm_{major}{minor}: an older one for old GPUs, a newer one for new GPUs",
    )


def has_kernels(capability: tuple[int, int], kernels_for: list[str]) -> bool:
    """Test whether any of a library's kernels can run on a GPU.

    Binaries ("sm_80", "sm_100f") run on GPUs of the same major version and the same or a later minor one; those with
    the letter "a" ("sm_90a") only on GPUs of exactly this version. Code that the driver compiles ("compute_80") runs on
    all later GPUs as well, unless it has a letter.

    Args:
        capability: the GPU's compute capability, such as (8, 0).
        kernels_for: architectures for which the kernels were built.
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


def major_version(version: str) -> int:
    """Return the number with which a version's text begins, such as 12 for "12.4"; 0 without one."""
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
