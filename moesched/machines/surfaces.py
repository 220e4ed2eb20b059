"""Interpolates measured times: over one variable, or over two, the size of an operation's weights and its rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from statistics import median

from moesched.machines.machine import CostPoint


class Curve:
    """Function from x to seconds: straight lines between measured points (x, seconds), which are given in any order.

    If there are several times at one x, their median is used. Below the first point, the line through the first two
    points is extended, but not below half of the first time. Above the last point, time grows at the slope from the
    first to the last point, or stays the same if that slope is negative. A single point's time is used for every x.

    Args:
        rising: whether a larger x never takes less time. Neighbouring times that fall, because of noise, are then
            replaced by their median.
    """

    def __init__(self, points: Iterable[tuple[float, float]], *, rising: bool = True) -> None:
        by_x: dict[float, list[float]] = {}
        for x, seconds in points:
            by_x.setdefault(x, []).append(seconds)
        self._xs = sorted(by_x)
        seconds_at = [median(by_x[x]) for x in self._xs]
        self._seconds = _rising(seconds_at) if rising else seconds_at

    def __call__(self, x: float) -> float:
        xs, seconds = self._xs, self._seconds
        if len(xs) == 1:
            return seconds[0]
        if x >= xs[-1]:
            return seconds[-1] + (x - xs[-1]) * max(0.0, seconds[-1] - seconds[0]) / (xs[-1] - xs[0])
        right = max(1, bisect_right(xs, x))
        left = right - 1
        at = seconds[left] + (x - xs[left]) * (seconds[right] - seconds[left]) / (xs[right] - xs[left])
        return max(at, seconds[0] / 2)


class Surface:
    """Function from size and rows to the seconds of an operation.

    Each measured size has a curve over rows. The values of these curves at the given rows are the points of a curve
    over sizes.

    More rows never take less time. Larger weights may take less, since a device uses more cores from some size on.

    Attributes:
        smallest, largest: the smallest and the largest measured size.
    """

    def __init__(self, points: Iterable[CostPoint]) -> None:
        by_size: dict[float, list[tuple[float, float]]] = {}
        for point in points:
            by_size.setdefault(point.size, []).append((point.rows, point.seconds))
        self._curves = {size: Curve(measured) for size, measured in by_size.items()}
        self.smallest, self.largest = min(by_size), max(by_size)

    def __call__(self, size: float, rows: float) -> float:
        through = ((each, curve(rows)) for each, curve in self._curves.items())
        return Curve(through, rising=False)(size)

    def at_no_size(self, rows: float) -> float:
        """Return the seconds at size 0 on the line through the two smallest sizes; 0 if only one size was measured."""
        sizes = sorted(self._curves)[:2]
        if len(sizes) == 1:
            return 0.0
        small, large = (self._curves[size](rows) for size in sizes)
        return small - sizes[0] * (large - small) / (sizes[1] - sizes[0])


def _rising(values: Iterable[float]) -> list[float]:
    """Return the closest rising numbers: falling neighbours are replaced by their median (isotonic regression).

    A mean instead of the median would let one outlier raise all its neighbours.
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and median(pools[-2]) >= median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [median(pool) for pool in pools for _ in pool]
