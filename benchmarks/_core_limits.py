"""The limits of a row of the expert kernel: how fast cores read the weights, and how fast they multiply by them.

`read_limit` is the rate of one loop over the same bytes on as many cores. `compute_limit` is the FLOP/s of the
instruction set's multiplication, from registers alone, over the FLOPs per byte of weights. The smaller one is the
limit.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from _compiled import compiled

SOURCE = Path(__file__).with_name("_core_limits.c")


def read_memory(address: int, nbytes: int) -> None:
    """Read memory with the calling thread."""
    _library().read_memory(address, nbytes)


def multiply(instruction_set: str, rounds: int) -> float:
    """Multiply registers with the calling thread; the FLOP that this was."""
    return float(_library().multiply(instruction_set.encode(), rounds))


@cache
def _library() -> ctypes.CDLL:
    library = compiled(SOURCE)
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.multiply.restype = ctypes.c_double
    library.multiply.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    return library
