"""Page-locked memory of the host for large buffers, which a GPU copies from and to by itself.

It is ordinary memory that CUDA is told of. What torch allocates as page-locked is rounded up to a power of two, and the
system may refuse direct reads into it.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from moesched.errors import OutOfMemory
from moesched.system.logs import Log
from moesched.system.memory_ahead import new_memory
from moesched.units import format_bytes

from ..shared.arena import round_up

PORTABLE = 1
"""Flag of CUDA: locked for all GPUs."""

_log = Log(__name__)


def locked_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """A zeroed uint8 tensor at a multiple of 4096 that a GPU copies from and to; unlocked when nothing refers to it.

    Raises:
        OutOfMemory: the system locked no more memory.
    """
    runtime: Any = torch.get_device_module(device).cudart()
    memory = new_memory(round_up(max(1, nbytes)))
    items = np.frombuffer(memory, np.uint8)
    items[:: mmap.PAGESIZE] = 0  # takes it now, in huge pages where there are any
    address = items.ctypes.data
    error = int(runtime.cudaHostRegister(address, items.nbytes, PORTABLE))
    if error:
        _take_error(device)
        raise OutOfMemory(
            f"out of memory: CUDA locks no {format_bytes(nbytes)} of the host's memory (error {error}): lower --budget "
            "pinned, end other programs, or give the container or virtual machine more memory"
        )
    # The memory is an argument, so that it is given back only after it was unlocked.
    weakref.finalize(items, _unlock, runtime, address, memory).atexit = False
    return torch.from_numpy(items)[:nbytes]


def locked_if_possible(nbytes: int, device: torch.device, what: str) -> torch.Tensor:
    """Bytes as `locked_bytes` gives them, or ordinary ones, whose copies are slow, where no more are locked.

    what: what they are for, for the warning.
    """
    try:
        return locked_bytes(nbytes, device)
    except OutOfMemory as error:
        _log.warning(f"{what} is not page-locked: its copies are slow", reason=str(error))
        return torch.zeros(nbytes, dtype=torch.uint8)


def _unlock(runtime: Any, address: int, memory: mmap.mmap) -> None:
    """Unlock memory, which is given back with the last reference to it."""
    runtime.cudaHostUnregister(address)


def _take_error(device: torch.device) -> None:
    """Have a call fail with the error that CUDA keeps, which a later one would raise otherwise."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
