"""Sums in the order of the ranks, so that every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moesched.seams import Array


def sum_in_order(parts: Mapping[int, Array]) -> Array:
    """The sum of arrays of one shape and type, from rank 0 on; a new array."""
    ranks = sorted(parts)
    first = parts[ranks[0]]
    if len(ranks) == 1:
        return first.copy()
    total = np.empty_like(first)
    np.add(first, parts[ranks[1]], out=total)
    for rank in ranks[2:]:
        np.add(total, parts[rank], out=total)
    return total


def pieces(elements: int, ranks: int) -> list[slice]:
    """Which of an array's elements each rank sums."""
    ends = [elements * rank // ranks for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]
