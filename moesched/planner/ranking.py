"""Makes the ranking of policies: the rate of each policy and the lane that bounds it, or the bytes that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from moesched.errors import BadInput
from moesched.planner.candidate import Candidate
from moesched.planner.resources import Gain, gains
from moesched.planner.schedules import Schedule
from moesched.planner.setting import UNLIMITED, Setting
from moesched.runs.planning import SMALLER
from moesched.steps.plan import Plan
from moesched.system.source_lines import raising_line
from moesched.units import format_bytes

PRECISION = 0.01
"""Largest relative error of the missing bytes; a plan that takes the same bytes with any budget has no error."""


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A policy with its best sizes, or with the bytes that it lacks.

    Attributes:
        throughput_tokens_per_second: all generated tokens, divided by the seconds from the end of loading.
        decode_step_seconds: time of a step in the middle of the generation.
        first_token_seconds: time from the end of loading to a prompt's first token, on average over the batch.
        bound_by: the busiest lane in such a decode step; in the prefill if there is no decode step.
        busy: the share of that decode step or prefill in which the lane `bound_by` is busy.
        estimate: whether the figures are extrapolated from a few layers, so that their order is uncertain; otherwise
            all layers were simulated.
        fits: whether the policy can be planned; figures are None otherwise.
        missing_bytes: sum of `missing`; 0 if the policy cannot be planned for another reason.
        missing: bytes that each memory lacks for one request, by memory.
        prefill_chunk: most prompt tokens that pass a layer together; None for all of a micro-batch.
        kv_on_gpu: share (0 to 1) of the KV cache on the accelerator; None if the policy does not split the cache.
        gain: the largest gain from a tenth more of a resource; None if no resource raises the rate.
        why: the reason why the policy cannot be planned.
    """

    policy: str
    throughput_tokens_per_second: float | None = None
    decode_step_seconds: float | None = None
    first_token_seconds: float | None = None
    bound_by: str | None = None
    busy: float | None = None
    estimate: bool = False
    fits: bool
    missing_bytes: int = 0
    missing: dict[str, int] = {}
    batch_size: int | None = None
    micro_batch_size: int | None = None
    prefill_chunk: int | None = None
    kv_on_gpu: float | None = None
    gain: Gain | None = None
    why: str | None = None

    @property
    def lacks(self) -> str:
        """The bytes that the policy lacks, in words; if it lacks none, the reason why it cannot be planned."""
        lacking = ", ".join(f"{format_bytes(nbytes)} more {name}" for name, nbytes in self.missing.items())
        return f"{lacking} would" if lacking else self.why or ""


def ranked(candidate: Candidate, schedule: Schedule) -> Ranked:
    """Return the row of the ranking for a policy that fits, with the figures of its best schedule."""
    busy = schedule.trial_run.utilization
    best = next(iter(gains(candidate, schedule)), None)
    lane = max(busy, key=busy.__getitem__)
    return Ranked(
        policy=candidate.name,
        throughput_tokens_per_second=schedule.throughput,
        decode_step_seconds=schedule.trial_run.step_seconds,
        first_token_seconds=schedule.trial_run.first_token_seconds,
        bound_by=lane,
        busy=busy[lane],
        estimate=not schedule.whole,
        fits=True,
        batch_size=schedule.batch_size,
        micro_batch_size=schedule.micro_batch_size,
        prefill_chunk=schedule.chunk,
        kv_on_gpu=schedule.kv_on_gpu if candidate.setting.splits_kv else None,
        gain=best if best is not None and best.share > 0 else None,
    )


class Misfit(NamedTuple):
    """A policy that cannot be planned.

    Attributes:
        why: the reason, in words.
        lacking: the setting for which `row` computes the missing bytes. It is None if the policy could not be made, or
            if its own code failed.
    """

    policy: str
    why: str
    lacking: Setting | None

    def row(self) -> Ranked:
        """Return the policy's row of the ranking, with the bytes that it lacks.

        Finding these bytes takes about ten plans for each memory.
        """
        missing = {} if self.lacking is None else missing_bytes(self.lacking)
        return Ranked(
            policy=self.policy,
            fits=False,
            missing_bytes=sum(missing.values()),
            missing=missing,
            why=self.why,
        )


def misfit(name: str, setting: Setting | None, error: Exception) -> Misfit:
    """Describe a policy whose plan raised an error.

    Args:
        setting: the setting of the plan; None if the policy itself could not be made.
    """
    if not isinstance(error, BadInput):
        return Misfit(name, f"{raising_line(error)}: {error!r}", None)
    return Misfit(name, str(error).removesuffix(f": {SMALLER}"), setting)  # the planner chose the sizes


def in_order(rows: Sequence[tuple[float, Ranked]], misfits: Sequence[Ranked]) -> list[Ranked]:
    """Order the rows of a ranking, the best first.

    First come policies with all layers simulated, by rate; then estimates, whose order may be wrong; then policies that
    lack bytes, the fewest first; then policies that cannot be planned for another reason.

    Args:
        rows: pairs of a rate and the row of a policy that fits.
        misfits: the rows of policies that cannot be planned.
    """
    fitting = [row for _, row in sorted(rows, key=lambda each: (each[1].estimate, -each[0]))]
    return fitting + sorted(misfits, key=lambda row: (not row.missing, row.missing_bytes))


def missing_bytes(setting: Setting) -> dict[str, int]:
    """Return the bytes that each memory lacks for a plan of one request, by memory.

    The result is empty if the plan fits, or if no budget would make it fit. The bytes of each memory are found with no
    limit to the other memories.
    """
    return {
        memory: lacking
        for memory in setting.machine.memories
        if (lacking := _lacking(setting, memory)) is not None and lacking > 0
    }


def _lacking(setting: Setting, memory: str) -> int | None:
    """Return the fewest bytes by which a memory's budget must grow for a plan of one request.

    The result is 0 if the plan fits already, and None if no budget of this memory makes it fit.
    """
    budget = setting.capacity(memory)
    if _plan(setting, memory, budget) is not None:
        return 0
    roomy = _plan(setting, memory, UNLIMITED)
    if roomy is None:
        return None
    enough = roomy.memories[memory].peak
    if _plan(setting, memory, enough) is None:
        return None
    short = budget
    if _plan(setting, memory, enough - 1) is None:
        return enough - budget
    while enough - short > max(1, PRECISION * (enough - budget)):
        middle = (short + enough) // 2
        short, enough = (short, middle) if _plan(setting, memory, middle) else (middle, enough)
    return enough - budget


def _plan(setting: Setting, memory: str, budget: int) -> Plan | None:
    """Plan one request with `budget` bytes of one memory and no limit to the others; None if it does not fit."""
    budgets = dict.fromkeys(setting.machine.memories, UNLIMITED) | {memory: budget}
    try:
        return setting.plan(setting.batch(1, 1), budgets, setting.kv_on_gpu)[0]
    except BadInput:
        return None
