"""Computes times of work on a processor, from the rates that its kernels sustain.

Work is classified by its operations: products with weights, attention, and movements of activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moesched.machines.launches import EXPERTS, is_attention, is_product, launches
from moesched.machines.machine import Processor
from moesched.machines.sustained import DeviceClass, Levels, device_class, group, rates_of
from moesched.work import Work, WorkPart

WAITED_FOR = {"route": "host_seconds", "sample": "step_seconds"}
"""Name of the rate that estimates the host's time, for each kind of work whose result the host awaits."""


class WorkTimes(NamedTuple):
    """Seconds that some work takes on a processor, by their use.

    Attributes:
        computing: time to compute, if memory took no time.
        moving: time to move the bytes at the rate that these kernels reach, if computing took no time.
        holding: time to move the bytes at the rate that all users of the memory reach together, if computing took no
            time; at most `moving`.
        working: time to compute and to move the bytes. The two overlap, except where a power limit prevents it.
        fixed: time to start the kernels, and time of the host's handling of the result.
    """

    computing: float
    moving: float
    holding: float
    working: float
    fixed: float


class KernelTimes:
    """Computes the times of `Work` on one processor in one dtype.

    Where a CPU's kernels convert blocks of weights, they compute at the rate of float32, without matrix units or 16-bit
    instructions.

    Args:
        name: name of the processor in its machine.
        peak: the processor's stated FLOP/s.
        bandwidth: stated bytes per second of its memory.
        usable: share of `bandwidth` that all users of the memory reach together.
        levels: by the name of a group of rates, "low" or "high": which of the group's estimates to use. Groups that are
            not named use the expected one.
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
        """Return the seconds that `work` takes on the processor."""
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
        holding = work.nbytes / (self._bandwidth * max(rates[reads], self._usable))
        turns = self._class.turns if weighing else 0.0
        working = max(computing, moving + turns * computing)
        return WorkTimes(computing, moving, holding, working, self._fixed(work))

    def _tiled(self, products: Iterable[WorkPart]) -> float:
        """Return the number of FLOPs that kernels compute, divided by the number that the products need.

        The ratio is at least 1, since a kernel for more than a few rows computes at least the rows of one tile.
        """
        least, few = self._class.tile_rows, self._class.few_rows
        asked = computed = 0.0
        for part in products:
            weights = part.size * part.times
            asked += weights * part.rows
            computed += weights * (part.rows if part.rows <= few else max(part.rows, least))
        return computed / asked if asked else 1.0

    def _reading_experts(self, work: Work) -> float:
        """Return the seconds to read the experts in `work` at the rate `expert_bandwidth`; 0 if none is stated."""
        if self._processor.expert_bandwidth is None:
            return 0.0
        weights = sum(part.times * part.size for part in work.parts if part.operation in EXPERTS)
        return weights / (self._processor.expert_bandwidth * self._off_expected)

    def _fixed(self, work: Work) -> float:
        """Return the seconds to start `work` and its kernels, and for the host to handle its result.

        A GPU starts each kernel, or the replay of a graph of kernels. A CPU's team of threads wakes once, and
        synchronises after each kernel. Work that is part of an earlier call starts nothing, unless the processor
        replays graphs. Without a class of device, the result is the processor's `launch_seconds`.
        """
        rates = self._rates
        if "launch_seconds" not in rates:
            return self._processor.launch_seconds
        if work.joins and not self._processor.replays:
            return 0.0
        waiting = rates[WAITED_FOR[work.kind]] if work.kind in WAITED_FOR else 0.0
        started = rates["launch_seconds"] * launches(work, replays=self._processor.replays)
        return rates.get("wake_seconds", 0.0) + started + waiting
