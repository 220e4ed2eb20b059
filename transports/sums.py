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
    first, *others = (parts[rank] for rank in sorted(parts))
    if not others:
        return first.copy()
    total: Array = np.asarray(first + others[0])
    for part in others[1:]:
        np.add(total, part, out=total)
    return total


def pieces(elements: int, ranks: int) -> list[slice]:
    """Which of an array's elements each rank sums."""
    ends = [elements * rank // ranks for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]
