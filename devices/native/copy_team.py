"""A team of threads that copies bytes within the host's memory, as one thread does not reach the memory's rate."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch

from .compiled import instruction_sets, library
from .kernels import address

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
"""The target and the source of a copy: contiguous uint8 tensors of one size."""

PIECE_BYTES = 1 << 20
"""Bytes that a thread copies at a time without the native library."""


class CopyTeam:
    """A team of threads that copy bytes.

    The native library's team works for one caller at a time; while it is busy, other callers copy on their own threads.

    Args:
        threads: number of threads, the caller included.
        native: True to use the native library if there is one.
    """

    def __init__(self, threads: int, *, native: bool = True) -> None:
        self._team = self._pool = None
        sets = instruction_sets()
        if native and sets:
            self._team = library().moesched_new_team(sets[0].encode(), threads - 1, None, 0, 0)
            if not self._team:
                raise MemoryError("no memory for the threads that copy")
        else:
            self._pool = ThreadPoolExecutor(threads, "copying")

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy the bytes of the source of each pair (target, source) to the target; targets must not overlap."""
        if self._pool is not None:
            list(self._pool.map(_copy, chain(*map(_pieces, pairs))))
            return
        pieces = array("q", chain(*((into.data_ptr(), what.data_ptr(), len(what)) for into, what in pairs)))
        library().moesched_copy(self._team, address(pieces), sum(len(what) for _, what in pairs))

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown()
        elif self._team is not None:
            library().moesched_free_team(self._team)
            self._team = None


def _pieces(pair: Pair) -> Sequence[Pair]:
    return list(zip(*(each.split(PIECE_BYTES) for each in pair), strict=True))


def _copy(pair: Pair) -> None:
    into, what = pair
    np.copyto(into.numpy(), what.numpy())
