"""Cost models: the time of a task's work on a machine.

The roofline is the maximum of the times to compute and to move bytes, at the rates that kernels sustain. A calibrated
machine has measured times of operations. Work on a resource that the machine does not describe is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from statistics import median

from moesched.errors import BadInput
from moesched.machines import (
    ATTENTION,
    ATTENTION_CALLS,
    FEW_ROWS,
    INTERCONNECT,
    MANY_ROWS,
    CostPoint,
    Link,
    Machine,
    Processor,
)
from moesched.machines.kernel_times import ONLY_MOVING, KernelTimes
from moesched.machines.networks import NETWORK
from moesched.machines.sustained import Levels, copies_of, is_rated, sustained_share, usable_share
from moesched.seams import CostModel, Demand
from moesched.tasks import Work, WorkPart

DISPATCH, HOP = "dispatch", "hop"
ATTENTIONS = ("attention", "attention call", "step attention", "attention prompt")
NO_LEVELS: Levels = {}
MOST_FEW_ROWS = 16
"""Most rows of a product that is bound by reading its weights, and uses most of the memory bandwidth."""


def cost_model(machine: Machine, dtype: str, levels: Levels = NO_LEVELS) -> CostModel:
    """The machine's measured costs if it was calibrated, else its roofline.

    Args:
        dtype: dtype that the model computes in.
        levels: rates that are not at their expected figure, by group.
    """
    return Calibrated(machine, dtype, levels) if machine.cost_table else Roofline(machine, dtype, levels)


class Roofline:
    """The rates that the machine's kernels and copies sustain, where work takes its slowest resource's time.

    With rates as stated, this is the roofline (MoE-Lightning, Eqs. 7 and 8).

    Args:
        levels: rates that are not at their expected figure, by group.
    """

    def __init__(self, machine: Machine, dtype: str, levels: Levels = NO_LEVELS) -> None:
        self.machine = machine
        self.dtype = dtype
        self._levels = levels
        self._kernels: dict[str, KernelTimes] = {}
        self._slowed = _slowed(machine)

    def work(self, work: Work) -> Demand:
        """Time alone and shares of each resource.

        Raises:
            BadInput: the machine has no such resource, or no rate for this dtype.
        """
        processor = self.machine.processors.get(work.resource)
        if processor is not None:
            times = self._times(work.resource, processor)(work)
            busy = ((work.resource, times.computing), (processor.memory, times.holding))
            return _demand(times.working, times.fixed, busy)
        for link in self.machine.links:
            if work.resource == f"{link.source}->{link.destination}":
                return self._copy(link, work.nbytes)
        group = self.machine.accelerator_group
        if work.resource == INTERCONNECT and group.interconnect is not None:
            seconds = work.nbytes / (group.interconnect.bandwidth * self._share(INTERCONNECT))
            rounds = 2 * (group.count - 1)  # a ring all-reduce sends the data round twice
            lanes = [(name, seconds) for name in (INTERCONNECT, *group.interconnect.paths)]
            return _demand(seconds, rounds * group.interconnect.latency, lanes)
        network = self.machine.network
        if work.resource == NETWORK and network is not None:
            moving = work.nbytes / (network.bandwidth * self._share(NETWORK))
            alone = _demand(moving, network.latency_seconds, ((NETWORK, moving),))
            lead = self.machine.accelerator.handover_seconds
            return alone._replace(seconds=lead + alone.seconds, lead=lead)
        raise BadInput(
            f"machine {self.machine.name} has no cost for {work.kind} on {work.resource!r}: "
            "describe that resource in its profile"
        )

    def _times(self, name: str, processor: Processor) -> KernelTimes:
        known = self._kernels.get(name)
        if known is None:
            peak = self.machine.peak(name, self.dtype)
            bandwidth = self.machine.memories[processor.memory].bandwidth
            usable = usable_share(self.machine)
            known = KernelTimes(name, processor, peak, bandwidth, usable, self._levels)
            self._kernels[name] = known
        return known

    def _copy(self, link: Link, nbytes: float) -> Demand:
        seconds = nbytes / (link.bandwidth * sustained_share(self.machine, link, self._levels))
        usable = usable_share(self.machine)
        ends = tuple(
            (self._modules(end), nbytes / (self.machine.memories[end].bandwidth * usable))
            for end in (link.source, link.destination)
        )
        alone = _demand(seconds, link.latency, ((link.lane, seconds), *ends))
        name = f"{link.source}->{link.destination}"
        slowed = self._slowed.get(name)
        return alone._replace(sort=name, slowed=tuple(slowed)) if slowed else alone

    def _modules(self, memory: str) -> str:
        """The memory that a memory is a part of: pinned memory is the host's, where rates are told from peaks."""
        pinned = memory == self.machine.roles.pinned and is_rated(self.machine)
        return self.machine.host.memory if pinned else memory

    def _share(self, kind: str) -> float:
        return copies_of(self.machine).rates[kind].at(self._levels.get(kind, "expected"))


class Calibrated:
    """Costs from a machine's table of measured operations: a work takes the sum of its parts.

    Times are interpolated between measured sizes and rows. Concurrent work is slowed by the measured rates. Work
    without parts uses the roofline.

    Raises:
        BadInput: the machine has no measured costs in this dtype.
    """

    def __init__(self, machine: Machine, dtype: str, levels: Levels = NO_LEVELS) -> None:
        self.machine = machine
        self.dtype = dtype
        self._roofline = Roofline(machine, dtype)
        self._speeds = {sort: machine.spread[sort].at(level) for sort, level in levels.items()}
        points: dict[str, list[CostPoint]] = {}
        for point in machine.cost_table:
            if point.dtype in ("", dtype):
                points.setdefault(point.operation, []).append(point)
        if not any(point.dtype == dtype for point in machine.cost_table):
            raise BadInput(
                f"machine {machine.name} was not measured in {dtype}: run `moesched calibrate`, "
                "or choose another --dtype"
            )
        self._surfaces = {operation: Surface(measured) for operation, measured in points.items()}
        self._slowed = _slowed(machine)

    def work(self, work: Work) -> Demand:
        """The sum of the parts' times, and the speed beside other work.

        Raises:
            BadInput: an operation was not measured, or the roofline does not cover the work.
        """
        if not work.parts:
            return self._roofline.work(work)
        seconds = lead = 0.0
        for part in work.parts:
            if part.operation == HOP:
                lead += part.times * self.seconds(part)
            else:
                seconds += part.times * self.seconds(part)
        if DISPATCH in self._surfaces:
            lead += self.seconds(WorkPart(DISPATCH, 0))
        sort = sort_of(work)
        seconds /= self._speeds.get(sort, 1.0)
        return Demand(lead + seconds, (), sort, tuple(self._slowed.get(sort, ())), lead)

    def seconds(self, part: WorkPart) -> float:
        """The time of one of a part's operations.

        Raises:
            BadInput: the operation was not measured.
        """
        surface = self._surfaces.get(part.operation)
        if surface is None:
            raise BadInput(
                f"machine {self.machine.name} has no cost for {part.operation!r} in {self.dtype}: "
                "run `moesched calibrate`"
            )
        return surface(part.size, part.rows)


def _slowed(machine: Machine) -> dict[str, list[tuple[str, float]]]:
    """The measured speeds of each kind of work beside others."""
    found: dict[str, list[tuple[str, float]]] = {}
    for pair in machine.contention:
        found.setdefault(pair.work, []).append((pair.beside, pair.rate))
    return found


def sort_of(work: Work) -> str:
    """The kind of a work with parts, which decides how it and other work slow each other."""
    operation = work.parts[0].operation
    if operation in ATTENTIONS:
        calls = sum(part.times for part in work.parts if part.operation == "attention call")
        return ATTENTION_CALLS if calls > 1 else ATTENTION
    if operation == work.resource:
        return operation
    rows = max(work.parts, key=_weights).rows
    return FEW_ROWS if rows <= MOST_FEW_ROWS else MANY_ROWS


def _weights(part: WorkPart) -> float:
    """Bytes of weights that a part reads."""
    return 0.0 if part.operation in ONLY_MOVING else part.size * part.times


class Curve:
    """Time through measured points (x, seconds), in any order: straight lines between them.

    At one x, the median of several times counts. Below the first point, the first line continues down to half of the
    first time. Above the last point, time grows at the average slope.

    Args:
        rising: whether a larger x never takes less time. Neighbours that fall, because of noise, then take their
            median.
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
    """Time of one operation by its size and rows: a curve over rows at each size, and a curve over sizes through those.

    More rows never take less time. Larger weights may, since a device uses more cores from some size on.
    """

    def __init__(self, points: Iterable[CostPoint]) -> None:
        by_size: dict[float, list[tuple[float, float]]] = {}
        for point in points:
            by_size.setdefault(point.size, []).append((point.rows, point.seconds))
        self._curves = {size: Curve(measured) for size, measured in by_size.items()}

    def __call__(self, size: float, rows: float) -> float:
        through = ((each, curve(rows)) for each, curve in self._curves.items())
        return Curve(through, rising=False)(size)


def _rising(values: Iterable[float]) -> list[float]:
    """The closest rising numbers: neighbours that fall become their median (isotonic regression).

    A mean would let one outlier raise all its neighbours.
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and median(pools[-2]) >= median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [median(pool) for pool in pools for _ in pool]


def _demand(working: float, fixed: float, busy: Iterable[tuple[str, float]]) -> Demand:
    seconds = working + fixed
    shares: dict[str, float] = {}
    for resource, alone in busy:
        if alone > 0:
            shares[resource] = min(1.0, round(shares.get(resource, 0.0) + alone / seconds, 3))
    return Demand(seconds, tuple(shares.items()), fixed=fixed)
