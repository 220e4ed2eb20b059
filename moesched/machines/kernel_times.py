"""The time of a processor's work, from the rates that its kernels sustain.

Work is classified by its operations: products with weights, attention, and movements of activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moesched.machines.machine import Processor
from moesched.machines.sustained import DeviceClass, Levels, device_class, group, rates_of
from moesched.tasks import Work, WorkPart

EXPERTS = ("expert", "resident expert", "experts", "resident experts")
ONLY_MOVING = ("combine", "embed")
WAITED_FOR = {"route": "host_seconds", "sample": "step_seconds"}
"""Kinds of work whose result the host reads before it goes on, and the rate of the time that it then takes."""

KERNELS_OF_A_PRODUCT, KERNELS_OF_EXPERTS, KERNELS_OF_ATTENTION = 3, 5, 2
"""Kernels of a product with its norm and activation, of an expert or of grouped ones, and of attention."""


class WorkTimes(NamedTuple):
    """Seconds of computing and of moving bytes, each alone, of both together, and of starting kernels.

    `holding` are those in which the memory could move as many bytes, for whoever asks.
    """

    computing: float
    moving: float
    holding: float
    working: float
    fixed: float


class KernelTimes:
    """Times of one processor in one dtype.

    Kernels that convert blocks of weights run on a CPU's vectors, without its matrix units and 16-bit instructions.

    Args:
        peak: its stated FLOP/s.
        bandwidth: its memory's stated bytes per second.
        usable: the share of that which all who use the memory reach together.
        levels: rates that are not at their expected figure.
    """

    def __init__(
        self, name: str, processor: Processor, peak: float, bandwidth: float, usable: float, levels: Levels
    ) -> None:
        self._class: DeviceClass = device_class(processor.device_class)
        self._processor = processor
        is_team = "wake_seconds" in rates_of(processor)
        self._peak = peak
        self._converting_peak = min(peak, processor.flops.get("float32", peak)) if is_team else peak
        self._bandwidth = bandwidth
        self._usable = usable
        self._rates = {
            rate: estimate.at(levels.get(group(name, processor, rate), "expected"))
            for rate, estimate in rates_of(processor).items()
        }
        self._off_expected = self._rates["weights"] / rates_of(processor)["weights"].expected

    def __call__(self, work: Work) -> WorkTimes:
        """The times of a work."""
        rates = self._rates
        flops, reads = work.flops, "weights"
        computes = "products"
        weighing = [part for part in work.parts if is_product(part)]
        if weighing:
            flops *= self._tiled(weighing)
        elif any(is_attention(part) for part in work.parts):
            computes, reads = "prompts", "attention"
        elif work.parts:
            reads = "moves"
        peak = self._converting_peak if weighing and work.kernel_rate < 1 else self._peak
        computing = flops / (peak * rates[computes] * work.kernel_rate)
        moving = max(work.nbytes / (self._bandwidth * rates[reads]), self._reading_experts(work))
        turns = self._class.turns if weighing else 0.0
        working = max(computing, moving + turns * computing)
        holding = moving * min(1.0, rates[reads] / self._usable)
        return WorkTimes(computing, moving, holding, working, self._fixed(work))

    def _tiled(self, products: Iterable[WorkPart]) -> float:
        """The factor of FLOPs that kernels compute beyond those asked for, since they compute whole tiles of rows."""
        least, few = self._class.tile_rows, self._class.few_rows
        asked = computed = 0.0
        for part in products:
            weights = part.size * part.times
            asked += weights * part.rows
            computed += weights * (part.rows if part.rows <= few else max(part.rows, least))
        return computed / asked if asked else 1.0

    def _reading_experts(self, work: Work) -> float:
        """The time of reading the work's experts at the processor's `expert_bandwidth`; 0 where it has none."""
        if self._processor.expert_bandwidth is None:
            return 0.0
        weights = sum(part.times * part.size for part in work.parts if part.operation in EXPERTS)
        return weights / (self._processor.expert_bandwidth * self._off_expected)

    def _fixed(self, work: Work) -> float:
        """The time of starting the work and its kernels, and of what the host does with its result.

        A GPU starts each kernel. A team of threads wakes once for a work, and meets after each of its kernels. A work
        that joins an earlier call starts nothing. A file without a class of device states the time of each operation.
        """
        rates = self._rates
        if "launch_seconds" not in rates:
            return self._processor.launch_seconds
        if work.joins:
            return 0.0
        waiting = rates[WAITED_FOR[work.kind]] if work.kind in WAITED_FOR else 0.0
        each = rates["launch_seconds"]
        return rates.get("wake_seconds", 0.0) + each * sum(map(kernels, work.parts)) + waiting


def kernels(part: WorkPart) -> float:
    """The number of kernels of a part."""
    if is_product(part):
        if part.operation.endswith("experts"):
            return KERNELS_OF_EXPERTS * min(1.0, part.times)
        return part.times * (KERNELS_OF_EXPERTS if part.operation in EXPERTS else KERNELS_OF_A_PRODUCT)
    return KERNELS_OF_ATTENTION if is_attention(part) else 1.0


def is_attention(part: WorkPart) -> bool:
    """Test whether a part is attention itself, not a projection before or after it."""
    return "attention" in part.operation.split()


def is_product(part: WorkPart) -> bool:
    """Test whether a part multiplies rows with weights."""
    return part.size > 0 and part.operation not in ONLY_MOVING and not is_attention(part)
