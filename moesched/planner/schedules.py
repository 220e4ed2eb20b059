"""Simulates schedules of one policy with given batch and chunk sizes, in all layers of the model or in a few."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from moesched.errors import BadInput, PolicyError
from moesched.planner.objectives import STEPS_OF_ALL_LAYERS, cheap_tasks, most_steps, rate
from moesched.planner.setting import Setting
from moesched.planner.shallow_trial import Cut, cut_like
from moesched.planner.traits import resident_bytes, weight_bytes
from moesched.planner.trial_run import TrialFigures, trial_run
from moesched.planner.uncertainty import Figures, Uncertainty, uncertainty
from moesched.runs.outcome import bytes_of_all_ranks
from moesched.runs.ranks import Rank
from moesched.seams import Policy
from moesched.steps.plan import Plan

NEAR_SHARE = 0.09
"""Largest difference between a plan's share of the KV cache on the accelerator and the given share.

The shares differ since each micro-batch has its whole cache in one memory.
"""


class SchedulePoint(NamedTuple):
    """A point of the planner's search: the sizes of a schedule to simulate.

    Attributes:
        size: requests of a micro-batch, µ.
        micro_batches: number of micro-batches.
        resident: number of micro-batches whose KV cache is on the accelerator; a whole number, except for a single
            micro-batch, whose cache is divided by layers.
        chunk: the largest number of tokens of a micro-batch that pass a layer together in prefill; None for no limit.
    """

    size: int
    micro_batches: int
    resident: float = 0
    chunk: int | None = None


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated schedule of a policy: its sizes and its predicted figures.

    Attributes:
        point: the sizes.
        weights_on_gpu: share of the weights' bytes that stays in the accelerator's memory, from 0 to 1.
        kv_on_gpu: share of the KV cache that stays in the accelerator's memory, from 0 to 1.
        few: the model cut to a few layers, with memory budgets in proportion, and nearly the same shares of weights and
            KV cache on the accelerator; None if there is no such cut model, or none was looked for.
        throughput: generated tokens per second, prefill included.
        bound: throughput if the schedule's lanes overlapped perfectly.
        rate: the figure that the setting's objective maximises.
    """

    point: SchedulePoint
    batch_size: int
    weights_on_gpu: float
    kv_on_gpu: float
    peak_bytes: dict[str, int]
    trial_run: TrialFigures
    few: Cut | None
    throughput: float
    bound: float
    rate: float

    @property
    def micro_batch_size(self) -> int:
        """Number of requests in the largest micro-batch."""
        return self.point.size

    @property
    def chunk(self) -> int | None:
        """Largest number of tokens of a micro-batch that pass a layer together in prefill; None for no limit."""
        return self.point.chunk

    @property
    def tasks_of_all_layers(self) -> float:
        """Number of tasks in a short simulation of all layers; extrapolated if only a few layers were simulated."""
        return (
            self.trial_run.tasks if self.whole or self.few is None else self.trial_run.tasks / self.few.part
        )

    @property
    def whole(self) -> bool:
        """True if all layers were simulated, so that the figures are not estimated from a few."""
        return self.few is None or self.trial_run.layers > self.few.setting.layout.config.layers


class Schedules:
    """Simulates schedules of a policy; each schedule is simulated once and kept.

    Args:
        setting: everything that a plan depends on, apart from the batch.

    Attributes:
        tasks: number of tasks of all trial runs.
    """

    def __init__(self, setting: Setting) -> None:
        self.tasks = 0
        self._setting = setting
        self._schedules: dict[tuple[SchedulePoint, bool], Schedule] = {}

    @property
    def best_first(self) -> list[Schedule]:
        """The schedules simulated so far, the highest rate first."""
        return sorted(self._schedules.values(), key=lambda schedule: schedule.rate, reverse=True)

    def at(self, point: SchedulePoint, *, deep: bool = False) -> Schedule:
        """Return the schedule with the sizes `point`; a schedule that was not simulated before is simulated now.

        If not all micro-batches fit, fewer are simulated.

        Args:
            deep: whether to simulate all layers; otherwise a few are simulated, if they stand for all.

        Raises:
            BadInput: not even one micro-batch fits, or the policy fails with a chunk size other than the setting's.
            PolicyError: the policy fails with the setting's chunk size.
        """
        if (point, deep) not in self._schedules:
            try:
                self._schedules[point, deep] = self._simulated(point, deep)
            except PolicyError as error:
                if point.chunk == self._setting.prefill_chunk:
                    raise
                raise BadInput(f"the policy takes no chunks of {point.chunk} tokens: {error}") from error
        return self._schedules[point, deep]

    def _simulated(self, point: SchedulePoint, deep: bool) -> Schedule:
        """Simulate a schedule with the sizes `point`.

        Args:
            deep: whether to simulate all layers; otherwise a few are simulated. All are simulated in any case if they
                have few tasks, or if no cut model has a plan like the whole model's.
        """
        plan, policy = self._fitting(point)
        batch, setting = plan.batch, self._of(point)
        share = plan.kv.on_gpu if setting.splits_kv else None
        steps = most_steps(setting.objective)
        found = None if deep else cut_like(setting, plan, share)
        few, trial = None, None
        if found is not None:
            few, prepared = found
            trial = few.trial(steps, prepared)
            self.tasks += trial.tasks
        if few is None or trial is None or trial.tasks / few.part <= cheap_tasks(setting.objective):
            trial = trial_run(plan, policy, setting.cost_of(plan), most_steps=max(steps, STEPS_OF_ALL_LAYERS))
            self.tasks += trial.tasks
        count = len(batch.micro_batches)
        return Schedule(
            point=point._replace(micro_batches=count, resident=resident_of(share or 0, count)),
            batch_size=len(batch.prompts),
            weights_on_gpu=resident_bytes(plan) / weight_bytes(plan),
            kv_on_gpu=plan.kv.on_gpu,
            peak_bytes={
                name: bytes_of_all_ranks(plan, memory, memory.peak) for name, memory in plan.memories.items()
            },
            trial_run=trial,
            few=few,
            throughput=trial.tokens_per_second(batch),
            bound=trial.bound(batch),
            rate=rate(setting.objective, trial, batch),
        )

    def deepened(self, schedule: Schedule) -> Schedule:
        """Return the same schedule, simulated in all layers."""
        return schedule if schedule.whole else replace(self.at(schedule.point, deep=True), few=schedule.few)

    def uncertainty(self, schedule: Schedule) -> Uncertainty:
        """Compute the uncertainty band of a schedule's figures from trial runs.

        The trial runs are of the schedule's cut model, `few`, or of the whole model if `few` is None.
        """
        run, few = schedule.trial_run, schedule.few
        return uncertainty(
            lambda: [Rank(*(few.plan() if few else self._fitting(schedule.point)))],
            Figures(schedule.throughput, run.step_seconds, run.prefill_seconds),
        )

    def _fitting(self, point: SchedulePoint) -> tuple[Plan, Policy]:
        """Plan a batch with as many micro-batches as `point` has or, if they do not fit, with as many as fit."""
        with suppress(BadInput):
            return self._plan(point)
        fewer = range(1, point.micro_batches)
        most = bisect_left(fewer, True, key=lambda count: not self._fits(with_count(point, count)))
        return self._plan(with_count(point, max(1, most)))

    def _fits(self, point: SchedulePoint) -> bool:
        try:
            self._plan(point)
        except BadInput:
            return False
        return True

    def _plan(self, point: SchedulePoint) -> tuple[Plan, Policy]:
        setting = self._of(point)
        share = point.resident / point.micro_batches if setting.splits_kv else None
        if share is not None and abs(share - (setting.kv_on_gpu or share)) > NEAR_SHARE:
            raise BadInput(
                f"{point.micro_batches} whole micro-batches have no share near {setting.kv_on_gpu:g}"
            )
        return setting.plan(setting.batch(point.micro_batches, point.size), kv_on_gpu=share)

    def _of(self, point: SchedulePoint) -> Setting:
        """Return the setting with the size of prefill chunks that `point` has."""
        return with_chunk(self._setting, point.chunk)


def with_chunk(setting: Setting, chunk: int | None) -> Setting:
    """Return the setting with prefill chunks of at most `chunk` tokens; None for no limit."""
    return setting if setting.prefill_chunk == chunk else replace(setting, prefill_chunk=chunk)


def with_count(point: SchedulePoint, count: int) -> SchedulePoint:
    """Return the sizes in `point` with `count` micro-batches instead.

    The share of the KV cache on the accelerator stays the same, up to the rounding to whole micro-batches.
    """
    return point._replace(
        micro_batches=count, resident=resident_of(point.resident / point.micro_batches, count)
    )


def resident_of(share: float, count: int) -> float:
    """Convert a share of the KV cache on the accelerator to a number of micro-batches whose cache is there.

    The number is whole, except for a single micro-batch, whose cache is divided by layers.

    Args:
        share: share of the KV cache on the accelerator, from 0 to 1.
        count: number of all micro-batches.
    """
    return share if count == 1 else round(share * count)
