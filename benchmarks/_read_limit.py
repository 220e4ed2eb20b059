"""Limits of a kernel that reads its operands once: reading the same bytes, and multiplying, on the same cores."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

from moesched.errors import BadInput
from moesched.system.cache import cache_folder

SOURCE = Path(__file__).with_suffix(".c")


@cache
def _library() -> ctypes.CDLL:
    """Compiled for this processor, anew when the source is newer."""
    built = cache_folder() / "read_limit.so"
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = shutil.which("cc")
        if compiler is None:
            raise BadInput("the limits are measured in C, and there is no cc: install GCC or Clang")
        built.parent.mkdir(parents=True, exist_ok=True)
        flags = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-funroll-loops")
        subprocess.run(
            [compiler, *flags, "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(built)], check=True
        )
    library = ctypes.CDLL(str(built))
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.multiply.argtypes = [ctypes.c_long, ctypes.c_int]
    library.multiply.restype = ctypes.c_double
    return library


def read_memory(tensor: torch.Tensor, threads: int) -> None:
    """Read a contiguous tensor once."""
    _library().read_memory(tensor.data_ptr(), tensor.nbytes, threads)


def multiply(rounds: int, threads: int) -> float:
    """Multiply and add float32 numbers in all threads; returns the number of operations."""
    operations: float = _library().multiply(rounds, threads)
    return operations
