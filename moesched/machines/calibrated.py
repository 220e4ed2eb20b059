"""Cost model of a machine whose accelerator and host share one memory, from measured times of operations."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.errors import BadInput
from moesched.machines.launches import ONLY_MOVING
from moesched.machines.machine import (
    ATTENTION,
    ATTENTION_CALLS,
    CACHE_WRITE,
    FEW_ROWS,
    MANY_ROWS,
    CostPoint,
    Machine,
)
from moesched.machines.product_times import RESIDENT, CodedCosts, ProductTimes
from moesched.machines.roofline import NO_LEVELS, Roofline, slowed_beside
from moesched.machines.surfaces import Curve, Surface
from moesched.machines.sustained import Levels
from moesched.models.config import ITEM_BYTES
from moesched.models.tensor_sizes import COLUMNS
from moesched.work import Demand, Work, WorkPart

CACHE_WRITING = "offload_kv"
"""Kind of the works that write to the KV cache on the host."""
DISPATCH, HOP, AWAIT = "dispatch", "hop", "await"
RESUME = "resume "
"""Beginning of the names of operations that have the extra time of a transfer on a link which was idle."""
PAUSE_SECONDS = 0.001
"""Least time without a transfer after which a link counts as idle."""
ATTENTIONS = ("attention", "attention call", "step attention", "attention prompt")
WITHIN = " within post_attention"
"""End of the names of operations that are parts of a task `post_attention`, which is one call of the native kernels."""
ROUTE_WITHIN, COMBINE_WITHIN = f"route{WITHIN}", f"combine{WITHIN}"
CACHED = "cached "
"""Beginning of the names of operations on weights that were fetched for an earlier task."""
CACHED_EXPERT = f"{CACHED}expert"
ON_WEIGHTS = ("pre_attention", "route", ROUTE_WITHIN, "sample", "expert", CACHED_EXPERT, "experts")
WITHIN_A_CALL = (ROUTE_WITHIN, "experts")
"""Operations on weights that share one call of the native kernels with others."""
MOST_FEW_ROWS = 16
"""Most rows with which a product is still bound by reading its weights, and so uses most of the memory bandwidth."""


def seconds_after_await(machine: Machine) -> Curve | None:
    """Return a function from a number of tasks to the seconds by which they start later if a policy awaits before them.

    The result is None if the machine's awaits were not measured. A policy submits one task after the other, and tasks
    start when it is done.
    """
    points = [(point.rows, point.seconds) for point in machine.cost_table if point.operation == AWAIT]
    return Curve(points) if points else None


class Calibrated:
    """Cost model from a machine's table of measured operations: work takes the sum of its parts' times.

    Times are interpolated between measured sizes and rows. For weights larger than the largest measured ones, extra
    time is added to the time at the largest measured size. The extra time is the difference between the times of a
    matrix product at the two sizes, times a factor, because products were timed by themselves, and then read weights
    faster than among a model's other operations. The factor is the measured time of a model's LM head divided by the
    time of the head's product by itself, but at least 1. Concurrent work is slowed as measured. Work without parts
    takes the time that the roofline gives.

    Args:
        dtype: dtype that the model computes in.
        levels: by the name of a class of work, "low" or "high": which end of the class's range of measured speeds to
            use. Classes that are not named use the median.

    Raises:
        BadInput: the machine has no measured costs in this dtype.
    """

    def __init__(self, machine: Machine, dtype: str, levels: Levels = NO_LEVELS) -> None:
        self.machine = machine
        self.dtype = dtype
        self._roofline = Roofline(machine, dtype)
        self._speeds = {name: machine.spread[name].at(level) for name, level in levels.items()}
        points: dict[str, list[CostPoint]] = {}
        for point in machine.cost_table:
            if point.dtype in ("", dtype) and not point.format:
                points.setdefault(point.operation, []).append(point)
        if not any(point.dtype == dtype for point in machine.cost_table):
            raise BadInput(
                f"machine {machine.name} was not measured in {dtype}: run `moesched calibrate`, "
                "or choose another --dtype"
            )
        self._surfaces = {operation: Surface(measured) for operation, measured in points.items()}
        self._products = ProductTimes(machine.cost_table)
        self._call = self._products.call_seconds(dtype)
        self._coded = CodedCosts(machine.cost_table, dtype, self._call)
        self._head = self._surfaces.get(f"{RESIDENT}sample")
        self._slowed = slowed_beside(machine)

    def work(self, work: Work) -> Demand:
        """Return the time that `work` takes alone, and its speeds beside other work, relative to running alone.

        Raises:
            BadInput: an operation was not measured, or the roofline does not cover the work.
        """
        if not work.parts:
            return self._roofline.work(work)
        seconds = lead = 0.0
        for part in self._priced(work):
            if part.operation == HOP:
                lead += part.times * self.seconds(part)
            else:
                seconds += part.times * self.seconds(part)
        if DISPATCH in self._surfaces:
            lead += self.seconds(WorkPart(DISPATCH, 0))
        work_class = work_class_of(work)
        seconds /= self._speeds.get(work_class, 1.0)
        return Demand(lead + seconds, (), work_class, tuple(self._slowed.get(work_class, ())), lead)

    def _priced(self, work: Work) -> Iterable[WorkPart]:
        """Yield the parts of `work`, each with the name of the operation in the cost table whose time applies to it.

        In a task `post_attention`, "route" becomes `ROUTE_WITHIN`, and "combine" `COMBINE_WITHIN`, if these were
        measured: there both run within a call of the native kernels, and the router does not hand its choices to the
        host. A cached expert takes as long as one that was just fetched, if no cached expert was measured.
        """
        for part in work.parts:
            within = part.operation + WITHIN
            if work.kind == "post_attention" and within in self._surfaces:
                yield part._replace(operation=within)
            elif part.operation == CACHED_EXPERT and CACHED_EXPERT not in self._surfaces:
                yield part._replace(operation="expert")
            else:
                yield part

    def seconds(self, part: WorkPart) -> float:
        """Return the seconds of one repetition of a part's operation.

        Raises:
            BadInput: the operation was not measured.
        """
        plain, longer = self._coded.plain(part)
        surface = self._surfaces.get(part.operation)
        if surface is None:
            raise BadInput(
                f"machine {self.machine.name} has no cost for {part.operation!r} in {self.dtype}: "
                "run `moesched calibrate`"
            )
        if beyond := self._beyond(plain, surface.largest):
            seconds = surface(surface.largest, plain.rows) + beyond
        else:
            seconds = surface(plain.size, plain.rows)
        if self._is_transposed(part):  # a run adds as much time as to a product with plain weights
            resident = part.operation.startswith(RESIDENT)
            added = seconds - self._product(plain.size, plain.rows, resident=resident)
            return self._product(plain.size, plain.rows, stored=COLUMNS) + max(0.0, added)
        return seconds if longer == 1.0 else self._longer(part, seconds, longer)

    def _longer(self, part: WorkPart, seconds: float, times: float) -> float:
        """Multiply a part's `seconds` by `times`, but not the fixed time of a call if the part is a call of its own."""
        call = 0.0 if part.operation.removeprefix(RESIDENT) in WITHIN_A_CALL else min(self._call, seconds)
        return call + times * (seconds - call)

    def _is_transposed(self, part: WorkPart) -> bool:
        """Test whether a part's weights are transposed, and products with such weights were measured."""
        return any(stored == COLUMNS for stored, _ in part.coded) and self._products.has_columns(self.dtype)

    def _beyond(self, part: WorkPart, largest: float) -> float:
        """Return the seconds that a product takes longer with a part's weights than with `largest` bytes of weights."""
        kind = part.operation.removeprefix(RESIDENT)
        if part.size <= largest or kind not in ON_WEIGHTS or not self._products.has(self.dtype):
            return 0.0
        resident = kind != part.operation

        longer = self._product(part.size, part.rows, resident=resident)
        return (longer - self._product(largest, part.rows, resident=resident)) * self._slower(part.rows)

    def _slower(self, rows: float) -> float:
        """Return the measured time of the largest LM head, divided by the time of its product alone.

        The result is at least 1, and 1 if no LM head was measured.

        rows: number of rows of activations in both products.
        """
        if self._head is None:
            return 1.0
        largest = self._head.largest
        return max(1.0, self._head(largest, rows) / self._product(largest, rows, resident=True))

    def _product(self, nbytes: float, rows: float, *, stored: str = "", resident: bool = False) -> float:
        """Return the seconds of a product alone.

        Args:
            nbytes: bytes that the weights take in the computation's dtype, from which their number follows.
            rows: number of rows of activations.
            stored: `COLUMNS` for transposed weights, empty for others.
            resident: whether the weights stay in memory, where a device may have packed them.
        """
        weights = nbytes / ITEM_BYTES[self.dtype]
        return self._products.seconds(self.dtype, weights, rows, stored=stored, resident=resident)


def work_class_of(work: Work) -> str:
    """Return the class of `work` in the table of measured slowdowns: one of WORK_CLASSES, or the name of a link."""
    operation = work.parts[0].operation
    if operation in ATTENTIONS:
        calls = sum(part.times for part in work.parts if part.operation == "attention call")
        return ATTENTION_CALLS if calls > 1 else ATTENTION
    if operation == work.resource:
        return CACHE_WRITE if work.kind == CACHE_WRITING else operation
    rows = max(work.parts, key=_weights).rows
    return FEW_ROWS if rows <= MOST_FEW_ROWS else MANY_ROWS


def _weights(part: WorkPart) -> float:
    """Return the bytes of weights that a part reads in all its repetitions."""
    return 0.0 if part.operation in ONLY_MOVING else part.size * part.times
