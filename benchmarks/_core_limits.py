"""The limits of a row of the expert kernel: how fast cores read the weights, and how fast they multiply by them.

`read_limit` is the rate of one loop over the same bytes on as many cores. `compute_limit` is the FLOP/s of the
instruction set's multiplication, from registers alone, over the FLOPs per byte of weights. The smaller one is the
limit.
"""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from zlib import crc32

from moesched.system.cache import cache_folder

SOURCE = Path(__file__).with_name("_core_limits.c")
COMPILE = ("cc", "-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")


def read_memory(address: int, nbytes: int) -> None:
    """Read memory with the calling thread."""
    _library().read_memory(address, nbytes)


def multiply(instruction_set: str, rounds: int) -> float:
    """Multiply registers with the calling thread; the FLOP that this was."""
    return float(_library().multiply(instruction_set.encode(), rounds))


@cache
def _library() -> ctypes.CDLL:
    """The loops, compiled for this processor on first use."""
    file = cache_folder() / f"core-limits-{crc32(SOURCE.read_bytes()):08x}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        begun = file.with_suffix(".part")
        subprocess.run([*COMPILE, "-o", str(begun), str(SOURCE)], check=True)
        begun.replace(file)
    library = ctypes.CDLL(str(file))
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.multiply.restype = ctypes.c_double
    library.multiply.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    return library
