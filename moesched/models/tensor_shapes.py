"""Shapes of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

Shape = tuple[int, ...]


def elements(shapes: Iterable[Shape]) -> int:
    """Number of elements of tensors with these shapes."""
    return sum(map(math.prod, shapes))
