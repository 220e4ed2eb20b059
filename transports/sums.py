"""Adds arrays in the order of the ranks, so that every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moesched.seams import Array


def sum_in_order(parts: Sequence[Array]) -> Array:
    """Add arrays of one shape and dtype in their order; returns a new array."""
    if len(parts) == 1:
        return parts[0].copy()
    total: Array = np.asarray(parts[0] + parts[1])
    if len(parts) > 2:
        for part in parts[2:]:
            np.add(total, part, out=total)
    return total


def pieces(elements: int, ranks: int) -> list[slice]:
    """Cut `elements` array elements into one slice of indices for each rank; lengths differ by at most one."""
    ends = [elements * rank // ranks for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]
