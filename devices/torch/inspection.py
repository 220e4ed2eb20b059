"""Facts about this machine for `moesched doctor`: torch, GPUs, native kernels, and how files are read."""

from __future__ import annotations

import ctypes
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from moesched.doctor.facts import Caching, KernelFacts
from moesched.errors import MoeschedError, OutOfMemory
from moesched.seams import ignore_progress
from moesched.system.cuda import CudaFacts, GpuFacts

from ..native.compiled import instruction_sets, why_unusable
from ..shared.direct_file import DirectFile
from .locked_memory import locked_bytes
from .registered_files import RegisteredFiles, spans_of

SMALLEST_LARGE = (1 << 20) + 1
"""Fewest bytes for which torch's allocator takes memory from a large segment."""
LEAST_LOCKED = 1 << 20
"""Fewest bytes that `lockable_bytes` tries to lock."""


def caching_of(file: Path) -> Caching:
    """Find out whether direct reads of a file leave its bytes out of the page cache.

    Raises:
        OSError: the file cannot be opened.
    """
    file.open("rb").close()
    with closing(DirectFile(file)) as opened:
        return opened.caching


def kernel_facts() -> KernelFacts:
    """Return facts about the native library of CPU kernels: instruction sets it can use, or why it is unusable."""
    return KernelFacts(sets=list(instruction_sets()), problem=why_unusable())


def cuda_facts(most_gpus: int | None = None) -> CudaFacts:
    """Return facts about CUDA, its driver and the GPUs that torch can use.

    most_gpus: the largest number of GPUs to inspect, as inspecting a GPU takes some of its memory; None for all.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
        count = torch.cuda.device_count() if usable else 0
        gpus = [_gpu(number) for number in range(count)[:most_gpus]]
        kernels_for = torch.cuda.get_arch_list() if usable else []
    return CudaFacts(
        torch=str(torch.__version__),
        built_for=torch.version.cuda or "",
        driver=_driver(),
        kernels_for=kernels_for,
        gpus=gpus,
        problem="; ".join(" ".join(str(each.message).split()) for each in warned),
        peak=torch.cuda.max_memory_reserved(0) if gpus else 0,
    )


def lockable_bytes(wanted: int, device: str = "cuda:0") -> int:
    """Find out how many bytes of the host's memory CUDA locks for a GPU, by trying.

    wanted: bytes to try first; then a half, a quarter and so on.

    Returns:
        the first of these numbers that CUDA locked; 0 if CUDA locked none.
    """
    while wanted >= LEAST_LOCKED:
        try:
            locked_bytes(wanted, torch.device(device))
        except OutOfMemory:
            wanted //= 2
        else:
            return wanted
    return 0


def library_bytes(device: str = "cuda:0") -> int:
    """Measure the bytes on a GPU that the first matrix product on a new stream takes, mostly cuBLAS's workspace."""
    place = torch.device(device)
    module: Any = torch.get_device_module(place)
    before: int = module.memory_reserved(place)
    with module.stream(module.Stream(place)):
        square = torch.ones((256, 256), device=place)
        large = torch.empty(SMALLEST_LARGE, dtype=torch.uint8, device=place)
        product = square @ square
        module.synchronize(place)
        taken: int = module.memory_reserved(place) - before
        del square, large, product
    module.empty_cache()
    return taken


def mapping_refusal(file: Path, device: str = "cuda:0") -> str:
    """Return the reason why a GPU cannot copy from a file in the page cache, and the remedy; empty if it can."""
    if not RegisteredFiles.possible():
        return "mapped files need Linux 5.14 or later: update the system"
    files, spans = RegisteredFiles(1, torch.device(device)), spans_of([(file, 0, 1)])
    with closing(files):
        try:
            files.keep(spans)
            files.register(spans, ignore_progress)
        except MoeschedError as error:
            return str(error)
    return ""


def _gpu(number: int) -> GpuFacts:
    properties = torch.cuda.get_device_properties(number)
    own = torch.cuda.memory_reserved(number)
    free, total = torch.cuda.mem_get_info(number)
    return GpuFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        total=total,
        free=free,
        own=own,
    )


def _driver() -> str:
    """Return the version of CUDA that the NVIDIA driver supports, such as "12.4"; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
