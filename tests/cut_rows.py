"""Random cuts of an expert's rows."""

from __future__ import annotations

from random import Random


def partition(choose: Random, rows: int, most: int) -> list[range]:
    """Up to `most` ranges in random order, which have every row once."""
    cuts = sorted(choose.sample(range(1, rows), choose.randint(0, min(most, rows) - 1)))
    ranges = [range(*ends) for ends in zip([0, *cuts], [*cuts, rows], strict=True)]
    return choose.sample(ranges, len(ranges))
