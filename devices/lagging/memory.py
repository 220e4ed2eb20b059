"""Imitated memory: blocks of the GPU, of which freed ones are handed on at once, and page-locked memory of the host."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import torch

from .streams import Gpu, LaggingStream

ROUNDING = 512
"""Bytes that sizes are rounded up to, as torch's allocator does."""

POISON = 0xFF
"""The byte in memory that was not written to: NaN in floats, -1 in integers."""


class Block:
    """Memory of the GPU; free as soon as nothing refers to it, whatever is still in the queues.

    Attributes:
        raw: its bytes.
        stream: the stream that allocated it, and whose next allocation of that size may get it.
    """

    def __init__(self, memory: GpuMemory, raw: torch.Tensor, stream: LaggingStream) -> None:
        self.raw = raw
        self.stream = stream
        self._memory = memory

    def __del__(self) -> None:
        self._memory.free(self.raw, self.stream)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor in this memory with another one's type, shape, strides and offset."""
        items = self.raw.view(like.dtype)
        return items.as_strided(like.size(), like.stride(), like.storage_offset())


class GpuMemory:
    """Allocates memory of the GPU by stream, as torch does.

    Args:
        capacity: bytes; None for as many as there are.

    Attributes:
        allocated, peak: bytes that are in use, and the most that were.
    """

    def __init__(self, gpu: Gpu, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocated = self.peak = 0
        self._gpu = gpu
        self._freed: deque[tuple[torch.Tensor, LaggingStream]] = deque()
        self._unused: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def allocate(self, nbytes: int) -> Block:
        """Memory for the current stream, poisoned as soon as that stream has come so far.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        size = max(1, -(-nbytes // ROUNDING)) * ROUNDING
        with self._gpu.lock:
            self._take_back()
            if self.capacity is not None and self.allocated + size > self.capacity:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {size} bytes more than {self.allocated}")
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            stream = self._gpu.current
            unused = self._unused[id(stream), size]
            if unused:
                raw = unused.pop()
                stream.enqueue(lambda: raw.fill_(POISON))
            else:
                raw = torch.full((size,), POISON, dtype=torch.uint8)
            return Block(self, raw, stream)

    def free(self, raw: torch.Tensor, stream: LaggingStream) -> None:
        """Take memory back; without a lock, since the collector may call it anywhere."""
        self._freed.append((raw, stream))

    def reset_peak(self) -> None:
        """Have the peak begin anew, with what is in use."""
        self.peak = self.in_use()

    def in_use(self) -> int:
        """Bytes that are in use now."""
        with self._gpu.lock:
            self._take_back()
            return self.allocated

    def _take_back(self) -> None:
        while self._freed:
            raw, stream = self._freed.popleft()
            self.allocated -= raw.nbytes
            self._unused[id(stream), raw.nbytes].append(raw)


class PinnedMemory:
    """Page-locked memory of the host: which addresses are locked.

    Attributes:
        registered: bytes of the memory that was locked as it is, by its address.
        most_registered: bytes that may be locked so; None for as many as there are.
    """

    def __init__(self) -> None:
        self._locked: set[int] = set()
        self.registered: dict[int, int] = {}
        self.most_registered: int | None = None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # CUDA's name
        """Lock memory; returns 0, or the number of CUDA's error."""
        most = self.most_registered
        if address in self.registered:
            return 712
        if most is not None and sum(self.registered.values()) + nbytes > most:
            return 2
        self.registered[address] = nbytes
        self._locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        """Unlock memory; returns 0, or the number of CUDA's error."""
        if address not in self.registered:
            return 713
        del self.registered[address]
        self._locked.discard(address)
        return 0

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A poisoned tensor in page-locked memory."""
        items = max(1, int(np.prod(size)))
        memory = np.full(items * dtype.itemsize + ROUNDING, POISON, np.uint8)
        weakref.finalize(memory, self._locked.discard, memory.ctypes.data)
        self._locked.add(memory.ctypes.data)
        skip = -memory.ctypes.data % 64
        raw = torch.from_numpy(memory)[skip : skip + items * dtype.itemsize]
        return raw.view(dtype)[: int(np.prod(size))].view(torch.Size(size))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host is in page-locked memory."""
        return tensor.untyped_storage().data_ptr() in self._locked
