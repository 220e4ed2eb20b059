"""Page-locked memory of the host for large buffers, which a GPU can copy from and to directly.

This is ordinary memory that is registered with CUDA. Torch's own page-locked memory is unsuitable for large buffers:
its size is rounded up to a power of two, and the system may refuse direct reads of files into it.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from moesched.errors import OutOfMemory
from moesched.system.logs import Log
from moesched.system.memory_ahead import new_memory
from moesched.units import format_bytes

from ..shared.arena import aligned_bytes, round_up

PORTABLE, READ_ONLY = 1, 8
"""Flags of CUDA: memory is locked for all GPUs; GPUs only read it, which is required if the process may not write."""

_log = Log(__name__)


def locked_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a zeroed, page-locked uint8 tensor of `nbytes` bytes, at an address that is a multiple of 4096.

    The memory is unlocked when nothing refers to it any more.

    device: the GPU's torch device.

    Raises:
        OutOfMemory: the system refused to lock memory.
    """
    memory = new_memory(round_up(max(1, nbytes)))
    items = np.frombuffer(memory, np.uint8)
    items[:: mmap.PAGESIZE] = 0  # takes it now, in huge pages where there are any
    try:
        unlock = lock(items.ctypes.data, items.nbytes, device, PORTABLE)
    except NotLocked as refusal:
        raise OutOfMemory(
            f"out of memory: CUDA locks no {format_bytes(nbytes)} of the host's memory ({refusal}): end other "
            "programs, give the container or virtual machine more memory, or lower --budget pinned"
        ) from refusal
    # The memory is an argument, so that it is given back only after it was unlocked.
    weakref.finalize(items, _unlock, unlock, memory).atexit = False
    return torch.from_numpy(items)[:nbytes]


def locked_if_possible(nbytes: int, device: torch.device, what: str) -> torch.Tensor:
    """Return `nbytes` bytes of page-locked memory; if the system locks none, warn and return ordinary memory.

    Copies between ordinary memory and a GPU are slow.

    Args:
        device: the GPU's torch device.
        what: the name or purpose of the memory, for the warning.
    """
    try:
        return locked_bytes(nbytes, device)
    except OutOfMemory as error:
        _log.warning(f"{what} is not page-locked: its copies are slow", reason=str(error))
        return aligned_bytes(nbytes)


class NotLocked(Exception):
    """An error: CUDA refuses to lock memory; the message has CUDA's error number."""


def lock(address: int, nbytes: int, device: torch.device, flags: int) -> Callable[[], None]:
    """Register memory of the process with CUDA, which locks its pages.

    Args:
        address: address of the first byte.
        nbytes: number of bytes.
        device: the GPU's torch device.
        flags: flags of CUDA, such as PORTABLE.

    Returns:
        a function that unregisters the memory; no copy from or to it may be under way then.

    Raises:
        NotLocked: CUDA refuses.
    """
    runtime: Any = torch.get_device_module(device).cudart()
    error = int(runtime.cudaHostRegister(address, nbytes, flags))
    if error:
        _take_error(device)
        raise NotLocked(f"error {error}")
    return partial(_unregister, runtime, address)


def wait_for_device(device: torch.device) -> None:
    """Block until a GPU has ended all its work, so that locked memory may be unlocked; does nothing on the CPU."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # a GPU that failed has ended
            torch.get_device_module(device).synchronize(device)


def _unregister(runtime: Any, address: int) -> None:
    runtime.cudaHostUnregister(address)


def _unlock(unlock: Callable[[], None], memory: mmap.mmap) -> None:
    """Unlock memory that was registered with CUDA; `memory` itself is freed later, with the last reference to it.

    unlock: the function that `lock` returned.
    """
    unlock()


def _take_error(device: torch.device) -> None:
    """Clear the last error of CUDA, which a later call would otherwise raise."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
