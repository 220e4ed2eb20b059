"""Segments of a GPU's memory, from which blocks are cut by the rules and sizes of torch's caching allocator."""

from __future__ import annotations

from collections.abc import Hashable

import torch

ROUNDING = 512
"""The sizes of blocks are rounded up to a multiple of this number of bytes."""
SMALL = 1 << 20
"""Most bytes of a block in a small segment; larger blocks are in large ones.

In a large segment, the rest of a piece that a block is cut from stays free only if it has more bytes than this.
Otherwise the block gets the whole piece.
"""
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
"""Bytes of a small and of a large segment.

A block of at least half a large segment gets a segment of its own, whose size is a multiple of a small segment's.
"""

POISON = 0xFF
"""The value of bytes that were not written to: NaN in floats, -1 in integers."""


class Piece:
    """A contiguous part of a segment, free or in use as one block.

    Attributes:
        memory: the bytes of the whole segment.
        start, nbytes: first byte in the segment, and number of bytes.
        pool: the segment's owner (a stream or a memory pool of graphs), and whether the segment is for small blocks.
        before, behind: the adjacent pieces in the segment; None at the segment's ends.
    """

    __slots__ = ("before", "behind", "free", "memory", "nbytes", "pool", "start")

    def __init__(self, memory: torch.Tensor, start: int, nbytes: int, pool: tuple[Hashable, bool]) -> None:
        self.memory = memory
        self.start = start
        self.nbytes = nbytes
        self.pool = pool
        self.free = False
        self.before: Piece | None = None
        self.behind: Piece | None = None

    def bytes(self) -> torch.Tensor:
        """Return the memory of the piece as a uint8 tensor."""
        return self.memory[self.start : self.start + self.nbytes]

    def cut(self, nbytes: int) -> Piece:
        """Shorten the piece to `nbytes` bytes; returns the rest as a new piece."""
        rest = Piece(self.memory, self.start + nbytes, self.nbytes - nbytes, self.pool)
        rest.before, rest.behind, self.nbytes = self, self.behind, nbytes
        if self.behind is not None:
            self.behind.before = rest
        self.behind = rest
        return rest

    def absorb(self) -> None:
        """Join the next piece of the segment to this one."""
        gone = self.behind
        assert gone is not None
        self.nbytes += gone.nbytes
        self.behind = gone.behind
        if self.behind is not None:
            self.behind.before = self


class Segments:
    """Cuts each block from the smallest free piece that has room for it; among equal ones, from the one freed last.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[tuple[Hashable, bool], list[Piece]] = {}

    def fits(self, nbytes: int, owner: Hashable) -> bool:
        """Test whether a block of `nbytes` bytes can be cut from existing segments of an owner.

        owner: a stream, or a memory pool of graphs.
        """
        nbytes = _rounded(nbytes)
        return any(piece.nbytes >= nbytes for piece in self._free.get((owner, nbytes <= SMALL), ()))

    def take(
        self, nbytes: int, owner: Hashable, capacity: int | None, *, releases: bool = True
    ) -> Piece | None:
        """Cut a block of `nbytes` bytes for an owner, from a new segment if none of the owner's has room.

        Args:
            owner: a stream, or a memory pool of graphs.
            capacity: the largest number of bytes of all segments together; None for no limit.
            releases: whether segments without a block in use may be freed to stay within the capacity.

        Returns:
            the block's memory; None if a new segment would exceed the capacity.
        """
        nbytes = _rounded(nbytes)
        pool = (owner, nbytes <= SMALL)
        unused = self._free.setdefault(pool, [])
        fitting = [piece for piece in unused if piece.nbytes >= nbytes]
        if fitting:
            piece = min(reversed(fitting), key=lambda each: each.nbytes)
            unused.remove(piece)
            piece.free = False
        else:
            size = _segment_bytes(nbytes)
            if capacity is not None and self.reserved + size > capacity:
                if releases:
                    self._release_unused()
                if self.reserved + size > capacity:
                    return None
            self.reserved += size
            piece = Piece(torch.full((size,), POISON, dtype=torch.uint8), 0, size, pool)
        if piece.nbytes - nbytes >= (ROUNDING if pool[1] else SMALL + 1):
            self._put(piece.cut(nbytes))
        return piece

    def give_back(self, piece: Piece) -> None:
        """Mark a block's memory as free, and join it with adjacent free pieces of its segment."""
        unused = self._free[piece.pool]
        if piece.behind is not None and piece.behind.free:
            unused.remove(piece.behind)
            piece.absorb()
        if piece.before is not None and piece.before.free:
            unused.remove(piece.before)
            piece = piece.before
            piece.absorb()
        self._put(piece)

    def _put(self, piece: Piece) -> None:
        piece.free = True
        self._free[piece.pool].append(piece)

    def _release_unused(self) -> None:
        """Free all segments without a block in use, except those of memory pools that a graph uses."""
        for pool, pieces in self._free.items():
            if getattr(pool[0], "is_live", False):
                continue
            whole = [piece for piece in pieces if piece.before is None and piece.behind is None]
            self.reserved -= sum(piece.nbytes for piece in whole)
            self._free[pool] = [piece for piece in pieces if piece not in whole]


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // ROUNDING)) * ROUNDING


def _segment_bytes(nbytes: int) -> int:
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    if nbytes < LARGE_SEGMENT // 2:
        return LARGE_SEGMENT
    return -(-nbytes // SMALL_SEGMENT) * SMALL_SEGMENT
