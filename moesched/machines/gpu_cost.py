"""Cost model of a machine with a GPU, from measured times of products, measured dispatch times, and measured rates.

A GPU's task takes as long as its kernels run, or as long as the host takes to start them if that is longer. Any other
task takes the time to start and the time to run, added up.
"""

from __future__ import annotations

from moesched.machines.calibrated import CACHE_WRITING, DISPATCH, work_class_of
from moesched.machines.launches import EXPERTS, is_product
from moesched.machines.machine import ATTENTION, ATTENTION_CALLS, CACHE_WRITE, CostPoint, Machine
from moesched.machines.product_times import PRODUCT, CodedCosts
from moesched.machines.roofline import NO_LEVELS, Roofline, slowed_beside
from moesched.machines.surfaces import Surface
from moesched.machines.sustained import Levels
from moesched.work import Demand, Work

CALLS = (*EXPERTS, "attention call", "attention prompt")
"""Operations of which a task may make any number of calls."""


class GpuCosts:
    """Cost model from the cost table and the rates of a machine with a GPU. Concurrent work is slowed as measured.

    Args:
        dtype: dtype that the model computes in.
        levels: maps the name of a group of rates to "low" or "high", the group's estimate to use; other groups use the
            expected estimate. The cost table's groups are "product" and "dispatch".
    """

    def __init__(self, machine: Machine, dtype: str, levels: Levels = NO_LEVELS) -> None:
        self.machine = machine
        self._rated = Roofline(machine, dtype, levels)
        self._slowed = slowed_beside(machine)
        self._speeds = {
            operation: machine.spread[operation].at(levels.get(operation, "expected"))
            for operation in (PRODUCT, DISPATCH)
            if operation in machine.spread
        }
        points: dict[tuple[str, str], list[CostPoint]] = {}
        for point in machine.cost_table:
            if point.dtype in ("", dtype) and not point.format:
                points.setdefault((point.resource, point.operation), []).append(point)
        self._surfaces = {key: Surface(measured) for key, measured in points.items()}
        self._coded = {
            name: CodedCosts((point for point in machine.cost_table if point.resource == name), dtype)
            for name in machine.processors
        }

    def work(self, work: Work) -> Demand:
        """Return the time that `work` takes alone, and its speeds beside other work, relative to running alone.

        Raises:
            BadInput: the machine has no such resource, or no rate for this dtype.
        """
        rated = self._rated.work(work)
        running, starting = self.running(work), self._starting(work, rated)
        on_gpu = work.resource == self.machine.roles.accelerator
        seconds = max(running, starting) if on_gpu else running + starting
        work_class = self._work_class(work)
        return rated._replace(
            seconds=seconds,
            fixed=starting,
            shares=(),
            work_class=work_class,
            slowed=tuple(self._slowed.get(work_class, ())),
        )

    def running(self, work: Work) -> float:
        """Return the seconds that the kernels or the copy of `work` run, without the seconds to start them.

        If `work` has products with weights, and such products were measured, only the products count.

        Raises:
            BadInput: the machine has no such resource, or no rate for this dtype.
        """
        surface = self._surfaces.get((work.resource, PRODUCT))
        products = [part for part in work.parts if is_product(part)]
        if surface is None or not products:
            rated = self._rated.work(work)
            return rated.seconds - rated.fixed
        coded = self._coded[work.resource]
        alike = ((part.times * longer, plain) for part in products for plain, longer in (coded.plain(part),))
        seconds = sum(times * surface(plain.size, plain.rows) for times, plain in alike)
        return seconds / self._speeds.get(PRODUCT, 1.0)

    def _starting(self, work: Work, rated: Demand) -> float:
        """Return the seconds to start all kernels of `work`; for a copy, its seconds apart from the transfer itself.

        They are the seconds measured for tasks of this kind, or follow from rates if such tasks were not measured. They
        also follow from rates if the processor replays graphs, since the measured kernels were started one by one.

        Args:
            rated: the demand of `work` by rates alone.
        """
        surface = self._surfaces.get((work.resource, f"{DISPATCH} {work.kind}"))
        processor = self.machine.processors.get(work.resource)
        if surface is None or (processor is not None and processor.replays):
            return rated.fixed
        moved = 0.0 if work.resource in self.machine.processors else work.nbytes
        return surface(moved, calls(work)) / self._speeds.get(DISPATCH, 1.0)

    def _work_class(self, work: Work) -> str:
        """Return the class of `work`, under which the slowdowns that it suffers and those that it causes are found.

        The class is empty for work on the GPU, whose kernels slow down nothing elsewhere. If cache writes were not
        measured, they have the class of other copies on the same link.
        """
        if work.resource == self.machine.roles.accelerator:
            return ""
        if work.resource not in self.machine.processors:
            measured = work.kind == CACHE_WRITING and CACHE_WRITE in self._slowed
            return CACHE_WRITE if measured else work.resource
        work_class = work_class_of(work)
        return ATTENTION if work_class == ATTENTION_CALLS else work_class


def calls(work: Work) -> float:
    """Count a task's kernel calls: one per expert; in attention, one per prompt or group of equally long sequences."""
    return sum(part.times for part in work.parts if part.operation in CALLS) or 1.0
