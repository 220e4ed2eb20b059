"""Segments of a GPU's memory, from which blocks are cut by the rules and sizes of torch's caching allocator."""

from __future__ import annotations

from typing import Any

import torch

ROUNDING = 512
"""Bytes to a multiple of which the sizes of blocks are rounded up."""
SMALL = 1 << 20
"""Most bytes of a block in a small segment; in a large segment, a rest is cut off only if it has more bytes."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
"""Bytes of a small and of a large segment.

A block of at least half a large segment gets one of its own, whose size is a multiple of that of a small one.
"""

POISON = 0xFF
"""The value of bytes that were not written to: NaN in floats, -1 in integers."""


class Piece:
    """A part of a segment, free or in use.

    Attributes:
        pool: the stream or the graphs that the segment belongs to, and whether its blocks are small.
        before, behind: the pieces next to it in the segment; None at its ends.
    """

    __slots__ = ("before", "behind", "free", "memory", "nbytes", "pool", "start")

    def __init__(self, memory: torch.Tensor, start: int, nbytes: int, pool: tuple[Any, bool]) -> None:
        self.memory = memory
        self.start = start
        self.nbytes = nbytes
        self.pool = pool
        self.free = False
        self.before: Piece | None = None
        self.behind: Piece | None = None

    def bytes(self) -> torch.Tensor:
        """The bytes of the piece."""
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
        """Join the next piece to this one."""
        gone = self.behind
        assert gone is not None
        self.nbytes += gone.nbytes
        self.behind = gone.behind
        if self.behind is not None:
            self.behind.before = self


class Segments:
    """Cuts blocks from segments: from the smallest free piece that fits; of equal ones, from that which was freed last.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[tuple[Any, bool], list[Piece]] = {}

    def fits(self, nbytes: int, owner: Any) -> bool:
        """Test whether a block can be cut from the segments of an owner, a stream or graphs."""
        nbytes = _rounded(nbytes)
        return any(piece.nbytes >= nbytes for piece in self._free.get((owner, nbytes <= SMALL), ()))

    def take(self, nbytes: int, owner: Any, capacity: int | None, *, releases: bool = True) -> Piece | None:
        """Cut a block for an owner, a stream or graphs; None if that would take segments beyond `capacity` bytes.

        releases: whether unused segments may be freed to stay within the capacity.
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
        """Free a block, and join it with free neighbours."""
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
        """Free the segments of which no block is in use, except those of graphs."""
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
