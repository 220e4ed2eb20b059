"""Schedules of one policy that were simulated: with some sizes, in all layers or in a few."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.planner.objectives import most_steps, rate
from moesched.planner.setting import Setting
from moesched.planner.shallow_trial import Cut, cut_like
from moesched.planner.traits import resident_bytes, weight_bytes
from moesched.planner.trial_run import TrialRun, trial_run
from moesched.planner.uncertainty import Figures, Uncertainty, uncertainty
from moesched.runs.outcome import bytes_of_all_ranks
from moesched.runs.ranks import Rank
from moesched.seams import Policy
from moesched.steps.plan import Plan


class Point(NamedTuple):
    """Sizes to try: µ, the number of micro-batches, and the number of those with their KV cache on the accelerator.

    That number is whole, apart from a single micro-batch, whose cache is divided by layers.
    """

    size: int
    micro_batches: int
    resident: float


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes for a policy, and the predicted figures of its schedule.

    Attributes:
        weights_on_gpu: share of the weights' bytes that stays in the accelerator's memory.
        kv_on_gpu: share of the KV cache that stays there.
        few: a few layers of it; None where a trial run needs all of them.
        throughput: generated tokens per second, prefill included.
        rate: the figure that the setting's objective maximises.
    """

    batch_size: int
    micro_batch_size: int
    weights_on_gpu: float
    kv_on_gpu: float
    peak_bytes: dict[str, int]
    trial_run: TrialRun
    few: Cut | None
    throughput: float
    rate: float

    @property
    def point(self) -> Point:
        """Its sizes."""
        count = -(-self.batch_size // self.micro_batch_size)
        return Point(self.micro_batch_size, count, resident_of(self.kv_on_gpu, count))


class Schedules:
    """Simulated schedules of a policy, each once.

    Args:
        deep: whether trial runs have all layers, not a few of them.

    Attributes:
        tasks: number of tasks of all trial runs.
    """

    def __init__(self, setting: Setting, *, deep: bool) -> None:
        self.tasks = 0
        self._setting = setting
        self._deep = deep
        self._seen: dict[tuple[Point, bool], Seen] = {}

    def see(self, size: int, micro_batches: int, resident: float = 0, *, deep: bool | None = None) -> Seen:
        """Simulate the schedule of that number of micro-batches, or of as many as fit.

        Args:
            resident: micro-batches whose KV cache stays on the accelerator, for a policy that splits it.
            deep: whether to simulate all layers; by default as the schedules are.
        """
        deep = self._deep if deep is None else deep
        point = Point(size, micro_batches, resident), deep
        if point not in self._seen:
            self._seen[point] = self._simulated(*point)
        return self._seen[point]

    def _simulated(self, point: Point, deep: bool) -> Seen:
        """Simulate a schedule."""
        size, micro_batches, resident = point
        plan, policy = self._fitting(size, micro_batches, resident)
        batch, setting = plan.batch, self._setting
        share = plan.kv.on_gpu if setting.splits_kv else None
        steps = most_steps(setting.objective)
        found = None if deep else cut_like(setting, plan, share)
        if found is None:
            few, seen = None, trial_run(plan, policy, most_steps=steps)
        else:
            few, prepared = found
            seen = few.trial(steps, prepared)
        self.tasks += seen.tasks
        return Seen(
            micro_batch_size=size,
            batch_size=len(batch.prompts),
            weights_on_gpu=resident_bytes(plan) / weight_bytes(plan),
            kv_on_gpu=plan.kv.on_gpu,
            peak_bytes={
                name: bytes_of_all_ranks(plan, memory, memory.peak) for name, memory in plan.memories.items()
            },
            trial_run=seen,
            few=few,
            throughput=seen.tokens_per_second(batch),
            rate=rate(setting.objective, seen, batch),
        )

    def deepened(self, seen: Seen) -> Seen:
        """The same schedule with all layers simulated."""
        return replace(self.see(*seen.point, deep=True), few=seen.few)

    def uncertainty(self, seen: Seen) -> Uncertainty:
        """The band of a schedule that was simulated, from runs of a few of its layers where those can stand for all."""
        run, few = seen.trial_run, seen.few
        return uncertainty(
            lambda: [Rank(*(few.plan() if few else self._fitting(*seen.point)))],
            Figures(seen.throughput, run.step_seconds, run.prefill_seconds),
        )

    def _fitting(self, size: int, micro_batches: int, resident: float) -> tuple[Plan, Policy]:
        """The plan of that number of micro-batches, or of the most that fit: the search knows only average lengths."""
        share = resident / micro_batches if self._setting.splits_kv else None
        count, step = micro_batches, 1
        while True:
            try:
                return self._setting.plan(self._setting.batch(count, size), kv_on_gpu=share)
            except BadInput:
                if count == 1:
                    raise
            count, step = max(1, count - step), 2 * step


def resident_of(share: float, count: int) -> float:
    """The micro-batches whose KV cache stays on the accelerator: a whole number, or the share of a single one."""
    return share if count == 1 else round(share * count)
