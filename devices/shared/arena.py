"""Arenas: large allocations that are cut into equal slots, each for one page of weights."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch

from moesched.models.host_buffers import CACHE_LINE
from moesched.system.memory_advice import HUGE_PAGE
from moesched.system.memory_ahead import new_memory

ALIGNMENT = 4096  # the address, file offset and length of a direct read are multiples of it


def round_up(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of ALIGNMENT (4096)."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def round_down(nbytes: int) -> int:
    """Round `nbytes` down to a multiple of ALIGNMENT (4096)."""
    return nbytes // ALIGNMENT * ALIGNMENT


class Arena:
    """One allocation that is cut into slots of equal size.

    Args:
        slots: number of slots.
        slot_bytes: bytes of a slot, which are rounded up to a multiple of 4096.
        allocate: function that takes a number of bytes, and returns a uint8 tensor whose address is a multiple of 4096;
            None for ordinary host memory.
    """

    def __init__(
        self, slots: int, slot_bytes: int, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self.slots = slots
        self.slot_bytes = round_up(slot_bytes)
        self.nbytes = self.nbytes_for(slots, slot_bytes)
        self._memory = (allocate or aligned_bytes)(self.nbytes)

    @property
    def on_cpu(self) -> bool:
        """True if the arena is in the host's memory."""
        return self._memory.is_cpu

    @staticmethod
    def nbytes_for(slots: int, slot_bytes: int) -> int:
        """Return the bytes of an arena of `slots` slots, each of `slot_bytes` rounded up to a multiple of 4096."""
        return slots * round_up(slot_bytes)

    def __len__(self) -> int:
        return self.slots

    def slot(self, index: int) -> torch.Tensor:
        """Return the `slot_bytes` bytes of slot `index` as a uint8 tensor, whose address is a multiple of 4096."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of an arena of {self.slots}")
        return self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def view(self, index: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """View the bytes of slot `index`, from byte `offset` on, as a tensor of this shape and dtype."""
        return typed_view(self.slot(index), offset, shape, dtype)


def typed_view(slot: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """View the bytes of `slot`, from byte `offset` on, as a tensor of this shape and dtype."""
    return slot[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(torch.Size(shape))


def copy_placed_alike(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; the copy has the same strides and, on the CPU, the same offset within a cache line.

    The last bits of a float32 product depend on that offset, and these bits must be the same for resident and streamed
    weights. A large copy is placed in huge pages, from which matrix products read a tenth to a quarter faster. On
    other devices the copy starts at a multiple of a cache line, as all weights do there.
    """
    if device.type != "cpu":
        memory = torch.empty(tensor.numel(), dtype=tensor.dtype, device=device)
        return memory.as_strided(tensor.shape, tensor.stride(), 0).copy_(tensor)
    skip = tensor.data_ptr() % CACHE_LINE // tensor.itemsize
    items = skip + tensor.numel()
    if tensor.nbytes >= HUGE_PAGE:
        memory = aligned_bytes(items * tensor.itemsize).view(tensor.dtype)
    else:
        memory = torch.empty(items, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), skip).copy_(tensor)


def aligned_bytes(nbytes: int) -> torch.Tensor:
    """Allocate a zeroed uint8 tensor of `nbytes` bytes, its address a multiple of 4096, in huge pages if there are any.

    For a direct read, the system pins each memory page to be filled and passes its address to the disk, so fewer and
    larger pages are faster. Direct reads into huge pages were measured at 3.9 GB/s with 2 % of a core, into small pages
    at 3.0 GB/s with 10 %. Shared memory gets no huge pages.
    """
    tensor = torch.frombuffer(new_memory(nbytes), dtype=torch.uint8)[:nbytes]
    # Writing to each page takes the memory now: the first touch during a read would be measured as the read.
    tensor.numpy()[:: mmap.PAGESIZE] = 0
    return tensor
