"""The type `Shape` of tensors, and the number of elements of tensors with given shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable

Shape = tuple[int, ...]


def elements(shapes: Iterable[Shape]) -> int:
    """Return the number of elements of all tensors with these shapes together."""
    return sum(map(math.prod, shapes))
