"""Computes the uncertainty band of a prediction by trial runs, with one rate at a time at its low or high end.

A rate is set to its low and to its high end, for all devices of a class together. Different rates are taken as
independent, so that their effects add up as squares, on a logarithmic scale. The error of the cost model itself
(`OMITTED`) is one more such effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, hypot, log
from typing import NamedTuple, TypeAlias

import msgspec

from moesched.analysis.published import PREFILL_SPREAD
from moesched.drivers.capture import CapturingEngine, NotFixed
from moesched.drivers.replay import CapturedRun
from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.machines.cost_model import CostModel
from moesched.machines.estimates import Level
from moesched.machines.sustained import at_peak, groups
from moesched.planner.trial_run import steps_of, trial_run, whole_steps
from moesched.requests.batch import Batch
from moesched.runs.assembly import assemble
from moesched.runs.ranks import Rank
from moesched.steps.contention import devices_contend
from moesched.tasks import Phase, Task
from moesched.work import Work

LEVELS: tuple[Level, ...] = ("low", "high")
LEAST = 0.05
"""A rate counts as without effect if it changes the sum of task times by less than this share of prefill and decode."""
MOST_STEPS = 3
"""Steps of a trial run with a changed rate, the prefill included."""
OMITTED = 1.2
"""Factor by which a machine may be slower or faster than predicted even if all its rates or costs are known.

It is about the largest error of docs/fidelity.md on a calibrated machine; for others it is assumed.
"""


class Figures(msgspec.Struct, frozen=True):
    """The figures of a prediction that have a band.

    Attributes:
        throughput_tokens_per_second: all generated tokens over the time from the end of loading.
        decode_step_seconds: time of a step in the middle of the generation.
        prefill_seconds: time from the end of loading to the last prompt's first token.
    """

    throughput_tokens_per_second: float
    decode_step_seconds: float
    prefill_seconds: float


FIGURES = Figures.__struct_fields__


class Uncertainty(NamedTuple):
    """The band of a prediction.

    Attributes:
        band: low end, expected value and high end of each figure, by the figure's name.
        at_peak: the figures if the machine reached the rates stated in its profile in full; None if its costs were
            measured.
        widest_rate: the rate that widens the band of the throughput most, in words; None if no rate changes it.
    """

    band: dict[str, tuple[float, float, float]]
    at_peak: Figures | None
    widest_rate: str | None


RunsProgress: TypeAlias = Callable[[int, int], object]
"""Callback that is given the number of finished trial runs and the number of all trial runs."""


def ignore_runs(done: int, total: int) -> None:
    """Ignore the progress of trial runs; callers that do not report progress pass this function."""


def uncertainty(
    make_ranks: Callable[[], Sequence[Rank]], expected: Figures, progress: RunsProgress = ignore_runs
) -> Uncertainty:
    """Compute the uncertainty band of a prediction from trial runs: simulations of a few steps with changed rates.

    Args:
        make_ranks: makes the plans and policies of all nodes anew, since a plan runs once.
        expected: the predicted figures, which may come from a simulation of more steps. The trial runs only tell by
            which factor a changed rate changes them.
        progress: called before the first trial run and after each, with the number of those done, and their total.
    """
    runs = _Runs(make_ranks, progress)
    machine, dtype = runs.machine, runs.dtype
    base = runs.figures(cost_model(machine, dtype))
    effects = {
        words: _effects(base, (runs.figures(cost_model(machine, dtype, {group: level})) for level in LEVELS))
        for group, words in groups(machine).items()
    }
    widths = {words: sum(effect[FIGURES[0]]) for words, effect in effects.items()}
    widest = max(widths, key=widths.__getitem__, default=None)
    omitted = dict.fromkeys(FIGURES, log(OMITTED))
    peak = None
    if not machine.cost_table:
        peak = _moved(expected, base, runs.figures(cost_model(at_peak(machine), dtype)))
        omitted["prefill_seconds"] = log(PREFILL_SPREAD)
    return Uncertainty(
        band={
            name: _band(getattr(expected, name), [(omits, omits), *(each[name] for each in effects.values())])
            for name, omits in omitted.items()
        },
        at_peak=peak,
        widest_rate=widest if widest is not None and widths[widest] > 0 else None,
    )


class _Runs:
    """Trial runs of one schedule with several cost models.

    If the schedule does not depend on times or computed values, it is captured once, and replayed with each cost model.
    """

    def __init__(self, make_ranks: Callable[[], Sequence[Rank]], progress: RunsProgress) -> None:
        self._make_ranks = make_ranks
        self._progress = progress
        ranks = make_ranks()
        plan = ranks[0].plan
        self.machine: Machine = plan.machine
        self.dtype = plan.layout.dtype
        self._batch: Batch = plan.batch
        fixed = len(ranks) == 1 and not devices_contend(plan) and plan.machine.wired_memory is None
        self._captured = _captured(ranks[0]) if fixed else None
        self._base: tuple[Figures, _WorkMeter] | None = None
        peak = 0 if self.machine.cost_table else 1
        self._done, self._all = 0, 1 + len(LEVELS) * len(groups(self.machine)) + peak
        progress(self._done, self._all)

    def figures(self, cost: CostModel) -> Figures:
        """Return the figures by a cost model, from a trial run or a replay.

        If the tasks would take almost the same times as in the first call, there is no trial run: the figures of the
        first call are returned.
        """
        found = self._figures(cost)
        self._done += 1
        self._progress(self._done, self._all)
        return found

    def _figures(self, cost: CostModel) -> Figures:
        if self._captured is not None:
            return _figures(self._captured.step_ends(cost), self._batch)
        if self._base is not None and self._base[1].change(cost) < LEAST:
            return self._base[0]
        meter = _WorkMeter()
        first, *peers = self._make_ranks()
        seen = trial_run(
            first.plan, first.policy, cost, peers=peers, observers=[meter], most_steps=MOST_STEPS
        )
        found = Figures(seen.tokens_per_second(self._batch), seen.step_seconds, seen.prefill_seconds)
        self._base = self._base or (found, meter)
        return found


class _WorkMeter:
    """Observer that counts the tasks of each `Work` object, in a run's prefill and in its decode steps."""

    def __init__(self) -> None:
        self._works: dict[Phase, dict[int, tuple[Work, int]]] = {"prefill": {}, "decode": {}}
        self._spans: dict[Phase, tuple[int, int]] = {}

    def ended(self, task: Task) -> None:
        """Count a task, unless the task loads weights before the first step."""
        phase = task.phase
        if phase is None:
            return
        start, end = self._spans.get(phase, (task.start, task.end))
        self._spans[phase] = min(start, task.start), max(end, task.end)
        works = self._works[phase]
        _, count = works.get(id(task.work), (task.work, 0))
        works[id(task.work)] = task.work, count + 1

    def change(self, cost: CostModel) -> float:
        """Return the change of task times under another cost model, as a share of the phase's time.

        The share is the sum of the absolute changes of all tasks of a phase, divided by the phase's time. The result is
        the share of prefill or of decode, whichever is larger; 0 if no task ran.
        """
        return max(
            (self._moved(phase, cost) / max(1, end - start) for phase, (start, end) in self._spans.items()),
            default=0.0,
        )

    def _moved(self, phase: Phase, cost: CostModel) -> float:
        """Return the sum of the absolute changes of a phase's task times under another cost model, in nanoseconds."""
        return 1e9 * sum(
            count * abs(cost.work(work).seconds - work.demand.seconds)
            for work, count in self._works[phase].values()
            if work.demand is not None
        )


def _captured(rank: Rank) -> CapturedRun | None:
    """Capture a trial run of a rank's plan for replay; None if its schedule depends on times or computed values."""
    steps, age = steps_of(rank.plan.batch)
    run = assemble(rank, CapturingEngine, steps=steps, age=age)
    try:
        return CapturedRun(run.run_state, rank.policy)
    except NotFixed:
        run.run_state.close()
        return None


def _figures(ends: Sequence[int], batch: Batch) -> Figures:
    """Return the figures of a replayed trial run.

    Args:
        ends: nanoseconds at the end of loading, and at the end of each step.
    """
    loaded, *steps = ends
    window = whole_steps(steps)
    step = (window[-1] - window[0]) / 1e9 / max(1, len(window) - 1)
    prefill = (steps[0] - loaded) / 1e9
    seconds = prefill + (batch.new_tokens - 1) * step
    return Figures(len(batch.prompts) * batch.new_tokens / seconds, step, prefill)


def _effects(base: Figures, others: Iterable[Figures]) -> dict[str, tuple[float, float]]:
    """Return the largest decrease and increase of each figure in other runs, as logarithms of ratios to `base`."""
    known = list(others)
    moves = {
        name: [_log_ratio(getattr(each, name), getattr(base, name)) for each in known] for name in FIGURES
    }
    return {name: (max(0.0, -min(each)), max(0.0, *each)) for name, each in moves.items()}


def _band(expected: float, effects: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the low end of a figure, its expected value (`expected`) and its high end.

    Args:
        effects: for each of several independent rates, the decrease and the increase of the figure, as logarithms of
            ratios.
    """
    down, up = (hypot(*(effect[side] for effect in effects)) for side in (0, 1))
    return expected * exp(-down), expected, expected * exp(up)


def _moved(expected: Figures, base: Figures, other: Figures) -> Figures:
    """Return the expected figures, each multiplied by the ratio of that figure in `other` to the figure in `base`."""
    return Figures(
        *(
            getattr(expected, name) * exp(_log_ratio(getattr(other, name), getattr(base, name)))
            for name in FIGURES
        )
    )


def _log_ratio(value: float, base: float) -> float:
    return log(value / base) if value > 0 and base > 0 else 0.0
