"""The imitated memory of a GPU, whose freed blocks are used again at once."""

from __future__ import annotations

from collections import deque

import torch

from .segments import POISON, Piece, Segments
from .streams import Gpu, LaggingStream


class Block:
    """A block of GPU memory; it is freed as soon as nothing refers to it, even if queued work still uses it.

    Attributes:
        raw: the bytes.
        stream: the stream that allocated it; later allocations of that stream may use it again.
        pool: the memory pool of graphs that it was taken from; None if the call that allocated it was not captured.
        inferring: whether the call that allocated it was made in torch's inference mode.
    """

    inferring = False

    def __init__(self, memory: GpuMemory, piece: Piece, nbytes: int, stream: LaggingStream) -> None:
        self.raw = piece.bytes()
        self.stream = stream
        self.pool = stream.capture and stream.capture.pool
        self._piece = piece
        self._nbytes = nbytes
        self._memory = memory

    def __del__(self) -> None:
        self._memory.free(self._piece, self._nbytes)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor in this memory with the dtype, shape, strides and offset of `like`."""
        items = self.raw.view(like.dtype)
        return items.as_strided(like.size(), like.stride(), items.storage_offset() + like.storage_offset())


class GpuMemory:
    """Allocates memory of one GPU by stream, as torch does.

    Args:
        capacity: bytes; None for no limit.

    Attributes:
        allocations: number of blocks that were allocated so far.
        wanted, most_wanted: bytes that blocks in use were asked for, now and at most so far.
        taken, most_taken: bytes of these blocks, whose sizes are rounded up, now and at most so far.
        most_reserved: most bytes so far of the segments from which blocks are cut.
    """

    def __init__(self, gpu: Gpu, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocations = 0
        self.wanted = self.most_wanted = self.taken = self.most_taken = self.most_reserved = 0
        self._gpu = gpu
        self._segments = Segments()
        self._freed: deque[tuple[Piece, int]] = deque()

    def allocate(self, nbytes: int, stream: LaggingStream) -> Block:
        """Allocate a block for a stream; the stream fills it with POISON when it reaches this point.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
            RuntimeError: the block needs memory of the system while another stream captures, which CUDA forbids.
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
        """Free a block's memory; this takes no lock, since the garbage collector may call it anywhere."""
        self._freed.append((piece, nbytes))

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return self._segments.reserved

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are in use now."""
        self.most_taken = self.in_use()

    def in_use(self) -> int:
        """Bytes of blocks that are in use now."""
        with self._gpu.lock:
            self._take_back()
            return self.taken

    def _take_back(self) -> None:
        while self._freed:
            piece, nbytes = self._freed.popleft()
            self.wanted -= nbytes
            self.taken -= piece.nbytes
            self._segments.give_back(piece)
