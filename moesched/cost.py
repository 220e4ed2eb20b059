"""Cost models: from the work of a task to time on a machine.

The roofline takes the longer of computing and moving bytes. A calibrated machine knows what operations took when they
were measured. Nothing is free: work that the machine does not describe is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import exp, log
from statistics import median
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.machines import CostPoint, Machine
from moesched.seams import CostModel
from moesched.tasks import Part, Work

PRODUCT, PACKED_PRODUCT = "product", "packed product"
DISPATCH, HOP = "dispatch", "hop"
COMPUTE, ATTENTION = "compute", "attention"
_ATTENTIONS = ("attention", "attention step", "attention prompt")


class Demand(NamedTuple):
    """What one task asks of the machine.

    Attributes:
        seconds: its time alone on the machine.
        shares: the share of each resource that it takes meanwhile, between 0 and 1, to three decimals, so that
            tasks of nearly the same kind share alike.
        sort: what others that run beside it are slowed by; empty where that was not measured.
        slowed: its speed beside a task of another sort, relative to being alone, as (sort, speed).
    """

    seconds: float
    shares: tuple[tuple[str, float], ...]
    sort: str = ""
    slowed: tuple[tuple[str, float], ...] = ()


def cost_model(machine: Machine, dtype: str) -> CostModel:
    """The machine's measured costs where it was calibrated, else its roofline.

    dtype: what the model computes in.
    """
    return Calibrated(machine, dtype) if machine.cost_table else Roofline(machine, dtype)


class Roofline:
    """Peak rates of the machine's description (MoE-Lightning, Eqs. 7 and 8)."""

    def __init__(self, machine: Machine, dtype: str) -> None:
        self.machine = machine
        self.dtype = dtype

    def work(self, work: Work) -> Demand:
        """Time alone and shares of each resource.

        Raises:
            BadInput: the machine has no such resource, or no rate for this dtype.
        """
        processor = self.machine.processors.get(work.resource)
        if processor is not None:
            if self.dtype not in processor.flops:
                raise BadInput(
                    f"machine {self.machine.name}: processor {work.resource} has no rate for {self.dtype}: "
                    "add it to its flops"
                )
            computing = work.flops / processor.flops[self.dtype]
            moving = work.nbytes / self.machine.memories[processor.memory].bandwidth
            seconds = max(computing, moving) + processor.launch_seconds
            return _demand(seconds, ((work.resource, computing), (processor.memory, moving)))
        for link in self.machine.links:
            if work.resource == f"{link.source}->{link.destination}":
                seconds = work.nbytes / link.bandwidth
                ends = tuple(
                    (end, work.nbytes / self.machine.memories[end].bandwidth)
                    for end in (link.source, link.destination)
                )
                return _demand(seconds + link.latency, ((link.lane, seconds), *ends))
        raise BadInput(
            f"machine {self.machine.name} has no cost for {work.kind} on {work.resource!r}: "
            "describe that resource in its profile"
        )


class Calibrated:
    """Costs from a machine's table of measured operations: a work takes the sum of its parts.

    Between two measured sizes time is interpolated on logarithmic scales. Below the smallest, which is all overhead,
    it stays; above the largest it grows as it did up to there. What runs at once is slowed as it was measured, pair by
    pair. Work that nothing is known of but its FLOPs and bytes is left to the roofline.

    Raises:
        BadInput: the machine has no measured costs in this dtype.
    """

    def __init__(self, machine: Machine, dtype: str) -> None:
        self.machine = machine
        self.dtype = dtype
        self._roofline = Roofline(machine, dtype)
        points: dict[str, list[CostPoint]] = {}
        for point in machine.cost_table:
            if point.dtype in ("", dtype):
                points.setdefault(point.operation, []).append(point)
        if PRODUCT not in points:
            raise BadInput(
                f"machine {machine.name} was not measured in {dtype}: run `moesched calibrate`, "
                "or choose another --dtype"
            )
        points.setdefault(PACKED_PRODUCT, points[PRODUCT])
        self._operations = {operation: _by_rows(measured) for operation, measured in points.items()}
        self._slowed: dict[str, list[tuple[str, float]]] = {}
        for pair in machine.contention:
            self._slowed.setdefault(pair.work, []).append((pair.beside, pair.rate))

    def work(self, work: Work) -> Demand:
        """The sum of the parts' times, and what slows the work.

        Raises:
            BadInput: an operation was not measured, and the machine's peak rates say nothing of it either.
        """
        if not work.parts:
            return self._roofline.work(work)
        seconds = [part.times * self.seconds(part) for part in work.parts]
        sort = self._sort(work, seconds)
        if DISPATCH in self._operations:
            seconds.append(self.seconds(Part(DISPATCH, 0)))
        return Demand(sum(seconds), (), sort, tuple(self._slowed.get(sort, ())))

    def seconds(self, part: Part) -> float:
        """What one of a part's operations takes.

        Raises:
            BadInput: the operation was not measured.
        """
        by_rows = self._operations.get(part.operation)
        if by_rows is None:
            raise BadInput(
                f"machine {self.machine.name} has no cost for {part.operation!r} in {self.dtype}: "
                "run `moesched calibrate`"
            )
        rows = [rows for rows, _ in by_rows]
        return Curve([(each, curve(part.size)) for each, curve in _around(by_rows, rows, part.rows)])(
            part.rows
        )

    def _sort(self, work: Work, seconds: Sequence[float]) -> str:
        """What most of the work is, as far as others that run beside it are concerned."""
        part = max(zip(seconds, work.parts, strict=True))[1]
        if part.operation in _ATTENTIONS:
            return ATTENTION
        return part.operation if part.operation == work.resource else COMPUTE


class Curve:
    """Time by size, through measured points: straight between them on logarithmic scales.

    Args:
        points: (size, seconds) in any order; times at one size count by their median. Time never falls with size:
            where a larger size was measured to be faster, that is noise.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        by_size: dict[float, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(size, []).append(seconds)
        self.sizes = sorted(by_size)
        self.seconds = list(accumulate((median(by_size[size]) for size in self.sizes), max))

    def __call__(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] + (size - sizes[-1]) * self._growth()
        right = bisect_left(sizes, size)
        low, high = sizes[right - 1], sizes[right]
        if low <= 0:
            return seconds[right - 1] + (seconds[right] - seconds[right - 1]) * size / high
        way = log(size / low) / log(high / low)
        return exp((1 - way) * log(seconds[right - 1]) + way * log(seconds[right]))

    def _growth(self) -> float:
        """Seconds per unit of size over all that was measured; by one point, all its time is for its size."""
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] / sizes[0] if sizes[0] > 0 else 0.0
        return (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])


def _by_rows(points: Sequence[CostPoint]) -> list[tuple[float, Curve]]:
    rows = sorted({point.rows for point in points})
    return [(each, Curve((p.size, p.seconds) for p in points if p.rows == each)) for each in rows]


def _around(
    by_rows: list[tuple[float, Curve]], rows: list[float], wanted: float
) -> list[tuple[float, Curve]]:
    """The curves of the measured rows on both sides; beyond the most, the first and the last."""
    right = bisect_left(rows, wanted)
    if right == len(rows):
        return [by_rows[0], by_rows[-1]]
    return by_rows[max(0, right - 1) : right + 1]


def _demand(seconds: float, busy: tuple[tuple[str, float], ...]) -> Demand:
    shares: dict[str, float] = {}
    for resource, alone in busy:
        if alone > 0:
            shares[resource] = min(1.0, round(shares.get(resource, 0.0) + alone / seconds, 3))
    return Demand(seconds, tuple(shares.items()))
