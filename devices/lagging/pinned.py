"""The page-locked memory of the host as imitated GPUs see it, and a record of its wrong uses."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from .segments import POISON, ROUNDING
from .streams import Gpu

READ_ONLY = 8
"""Flag of CUDA for memory that GPUs only read, required to register memory that the process may not write to."""

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 1, 2, 712, 713
"""Numbers of CUDA's errors."""


class PinnedMemory:
    """Keeps the addresses of the host's page-locked memory, and records its wrong uses.

    A queued copy has only the memory's address, so the memory must stay locked until the stream has run the copy.

    Args:
        gpu: the streams of the imitated GPUs.

    Attributes:
        registered: bytes of each piece of memory that `cudaHostRegister` locked, by the piece's address.
        most_registered: the largest number of bytes that may be registered; None for no limit.
        refuses_files: CUDA's error number for attempts to register read-only memory (mapped files); 0 to allow them.
        faults: descriptions of wrong uses of locked memory, after which a real GPU might copy wrong bytes, or fail.
        allocations: number of allocations of locked memory so far, registrations included.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.registered: dict[int, int] = {}
        self.most_registered: int | None = None
        self.refuses_files = 0
        self.faults: list[str] = []
        self.allocations = 0
        self._cached: dict[int, int] = {}
        self._queued: dict[int, tuple[int, int]] = {}
        self._copies = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # CUDA's name
        """Lock the pages of `nbytes` bytes from `address` on, given CUDA's flags; returns 0, or a CUDA error number."""
        most = self.most_registered
        if any(start < address + nbytes and address < end for start, end in self._registrations()):
            return ALREADY_REGISTERED
        if is_read_only(address) and (self.refuses_files or not flags & READ_ONLY):
            return self.refuses_files or INVALID_VALUE
        if most is not None and sum(self.registered.values()) + nbytes > most:
            return OUT_OF_MEMORY
        self.registered[address] = nbytes
        self.allocations += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        """Unlock the registered memory that begins at an address; returns 0, or a CUDA error number."""
        if address not in self.registered:
            self.faults.append(f"unregistered {address:#x}, which is not registered")
            return NOT_REGISTERED
        end = address + self.registered.pop(address)
        used = any(start < end and address < last for start, last in [*self._queued.values()])
        if used and self._gpu.failed_at is None:
            self.faults.append(f"unregistered {address:#x} before a copy that is in a queue")
        return 0

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor of this size and dtype in page-locked memory, filled with POISON (bytes 0xFF)."""
        items = max(1, int(np.prod(size)))
        memory = np.full(items * dtype.itemsize + ROUNDING, POISON, np.uint8)
        weakref.finalize(memory, self._cached.pop, memory.ctypes.data)
        self._cached[memory.ctypes.data] = memory.nbytes
        self.allocations += 1
        skip = -memory.ctypes.data % 64
        raw = torch.from_numpy(memory)[skip : skip + items * dtype.itemsize]
        return raw.view(dtype)[: int(np.prod(size))].view(torch.Size(size))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Test whether the whole of a host tensor is in page-locked memory.

        Raises:
            RuntimeError: only a part of the tensor is.
        """
        return tensor.untyped_storage().data_ptr() in self._cached or self._is_registered(tensor)

    def at_its_time(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that a queued copy calls when it runs, to find the memory of a host tensor.

        The function returns the tensor, or raises RuntimeError if the memory is no longer locked by then. Like a real
        copy, it keeps no reference to registered memory.

        tensor: the source or target of the copy, in page-locked memory.
        """
        if tensor.untyped_storage().data_ptr() in self._cached:
            return lambda: tensor  # torch keeps it until its copies ran
        start, end = bounds(tensor)
        of = tensor.dtype, tensor.size(), tensor.stride()
        self._copies += 1
        number = self._copies
        self._queued[number] = start, end

        def found() -> torch.Tensor:
            self._queued.pop(number, None)  # a captured copy runs often
            if not any(first <= start and end <= last for first, last in self._registrations()):
                raise RuntimeError(f"an illegal memory access: {start:#x} is locked no longer")
            memory = torch.frombuffer((ctypes.c_uint8 * (end - start)).from_address(start), dtype=of[0])
            return memory.as_strided(*of[1:])

        return found

    def _is_registered(self, tensor: torch.Tensor) -> bool:
        start, end = bounds(tensor)
        for first, last in self._registrations():
            if first <= start and end <= last:
                return True
            if first < end and start < last:
                raise RuntimeError("CUDA error: invalid argument: a part of a copy is in page-locked memory")
        return False

    def _registrations(self) -> Iterator[tuple[int, int]]:
        return ((start, start + nbytes) for start, nbytes in [*self.registered.items()])


def bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address after its last byte."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def is_read_only(address: int) -> bool:
    """Test whether this process may only read the memory at an address; always False outside Linux."""
    if sys.platform != "linux":
        return False
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags = line.split(maxsplit=2)[:2]
        first, _, last = span.partition("-")
        if address < int(last, 16):  # the mappings are in order
            return int(first, 16) <= address and "w" not in flags
    return False
