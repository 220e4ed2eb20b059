"""The imitated memory of a GPU: a freed block can be allocated again at once, even while queued work still uses it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from .segments import POISON, Piece, Segments
from .streams import Gpu, LaggingStream


class Form(NamedTuple):
    """The shape, strides and dtype of a tensor, and its offset from the start of its block, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int = 0) -> Form:
        """Return the form of a tensor that begins `offset` elements after the start of its block."""
        return cls(tuple(tensor.size()), tuple(tensor.stride()), offset, tensor.dtype)


class Block:
    """A block of GPU memory; freed with the last reference to this object, even if queued work still uses the block.

    Attributes:
        raw: the block's memory as a uint8 tensor of the CPU.
        nbytes: bytes that were requested for the block.
        stream: the stream that allocated the block. Once the block is freed, later allocations may reuse its memory:
            those from the `pool`, or those of this stream if there is no pool.
        pool: the memory pool of graphs that the block was taken from; None if the allocating call was not captured.
        inferring: whether the allocating call was made in torch's inference mode.
    """

    inferring = False

    def __init__(self, memory: GpuMemory, piece: Piece, nbytes: int, stream: LaggingStream) -> None:
        self.raw = piece.bytes()
        self.stream = stream
        self.pool = stream.capture and stream.capture.pool
        self._piece = piece
        self.nbytes = nbytes
        self._memory = memory

    def __del__(self) -> None:
        self._memory.free(self._piece, self.nbytes)

    def tensor(self, form: Form) -> torch.Tensor:
        """Make a tensor of a form in this block's memory."""
        items = self.raw.view(form.dtype)
        return items.as_strided(form.size, form.stride, items.storage_offset() + form.offset)


class GpuMemory:
    """Allocates memory of one GPU, for each stream from segments of its own, as torch does.

    Args:
        capacity: number of bytes that the GPU has; None for no limit.

    Attributes:
        allocations: number of blocks that were allocated so far.
        wanted, most_wanted: bytes that were requested for all blocks in use; now, and the largest number so far.
        taken, most_taken: bytes that all blocks in use take after rounding up; now, and the largest number since
            `reset_peak`.
        most_reserved: largest number of bytes so far of all segments; blocks are cut from segments.
    """

    def __init__(self, gpu: Gpu, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocations = 0
        self.wanted = self.most_wanted = self.taken = self.most_taken = self.most_reserved = 0
        self._gpu = gpu
        self._segments = Segments()
        self._freed: deque[tuple[Piece, int]] = deque()

    def allocate(self, nbytes: int, stream: LaggingStream) -> Block:
        """Allocate `nbytes` bytes for a stream; queued work of the stream fills them with POISON (bytes 0xFF).

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
            RuntimeError: a new segment is needed, and another stream captures in a mode that forbids such allocations.
        """
        with self._gpu.lock:
            self.allocations += 1
            self._take_back()
            owner = stream.capture.pool if stream.capture else stream
            if not (stream.capture or self._segments.fits(nbytes, owner)):
                self._gpu.refuse_unsafe()
            piece = self._segments.take(nbytes, owner, self.capacity, releases=not stream.capture)
            if piece is None:
                held = f"{self._segments.reserved} are reserved, {self.taken} in use"
                raise torch.OutOfMemoryError(f"CUDA out of memory: {nbytes} bytes of {self.capacity}: {held}")
            self.wanted += nbytes
            self.taken += piece.nbytes
            self.most_wanted = max(self.most_wanted, self.wanted)
            self.most_taken = max(self.most_taken, self.taken)
            self.most_reserved = max(self.most_reserved, self._segments.reserved)
            block = Block(self, piece, nbytes, stream)
            raw = block.raw
            stream.enqueue(lambda: raw.fill_(POISON))
            return block

    def free(self, piece: Piece, nbytes: int) -> None:
        """Mark a block's memory as free, without a lock: the garbage collector may call this anywhere in the code.

        Args:
            piece: the block's memory.
            nbytes: bytes that were requested for the block.
        """
        self._freed.append((piece, nbytes))

    @property
    def reserved(self) -> int:
        """Bytes of all segments, whether blocks in them are in use or not."""
        return self._segments.reserved

    def reset_peak(self) -> None:
        """Reset `most_taken` to the bytes of the blocks that are in use now."""
        self.most_taken = self.in_use()

    def in_use(self) -> int:
        """Return the bytes of the blocks that are in use now."""
        with self._gpu.lock:
            self._take_back()
            return self.taken

    def _take_back(self) -> None:
        while self._freed:
            piece, nbytes = self._freed.popleft()
            self.wanted -= nbytes
            self.taken -= piece.nbytes
            self._segments.give_back(piece)
