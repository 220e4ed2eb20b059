"""Makes a trial run of a schedule on the virtual clock: the prefill and a few decode steps, instead of all steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

import msgspec
import numpy as np
from msgspec.structs import replace

from moesched.engine import Engine
from moesched.machines.cost_model import CostModel
from moesched.requests.batch import Batch
from moesched.routing import SeededRouting
from moesched.runs.decisions import simulated_decisions
from moesched.runs.ranks import Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.seams import Observer, Policy
from moesched.steps.plan import Plan
from moesched.tasks import Lane, Task
from moesched.trace import Recorder

MANY_TOKENS = 512
"""From this number of tokens on, each expert's number of tokens is drawn, instead of each token's experts."""

MOST_STEPS = 5


class TrialFigures(msgspec.Struct, frozen=True):
    """The predicted figures of a run.

    Attributes:
        prefill_seconds: time from the end of loading to the last prompt's first token.
        first_token_seconds: time from the end of loading to a prompt's first token, on average.
        step_seconds: time of a decode step in the middle of the generation; 0 if there is none.
        utilization: for each lane, the share of such a step in which the lane is busy; if there is no decode step, the
            share of the prefill.
        prefill_utilization: for each lane, the share of the prefill in which the lane is busy.
        prefill: start and end of the prefill, in nanoseconds.
        decode: start and end, in nanoseconds, of the `steps` decode steps whose mean time is `step_seconds`.
        layers, tasks: numbers of layers and tasks that were run.
    """

    prefill_seconds: float
    first_token_seconds: float
    step_seconds: float
    utilization: dict[str, float]
    prefill_utilization: dict[str, float]
    prefill: tuple[int, int]
    decode: tuple[int, int]
    steps: int
    layers: int
    tasks: int

    def scaled(self, factor: float) -> TrialFigures:
        """Return the figures with all seconds multiplied by `factor`, for a model with `factor` times as many layers.

        Other figures do not change: utilization, and all that describe the run itself, such as `prefill` and `tasks`.
        """
        return replace(
            self,
            prefill_seconds=factor * self.prefill_seconds,
            first_token_seconds=factor * self.first_token_seconds,
            step_seconds=factor * self.step_seconds,
        )

    def seconds(self, batch: Batch) -> float:
        """Return the seconds of the batch from the end of loading: the prefill, and decode steps of equal time."""
        return self.prefill_seconds + (batch.new_tokens - 1) * self.step_seconds

    def tokens_per_second(self, batch: Batch) -> float:
        """Return the throughput: all generated tokens of the batch, divided by the result of `seconds`."""
        return len(batch.prompts) * batch.new_tokens / self.seconds(batch)

    def bound(self, batch: Batch) -> float:
        """Return the throughput if tasks overlapped perfectly: each phase then takes as long as its busiest lane."""
        prefill = self.prefill_seconds * max(self.prefill_utilization.values())
        step = self.step_seconds * max(self.utilization.values(), default=0.0)
        return len(batch.prompts) * batch.new_tokens / (prefill + (batch.new_tokens - 1) * step)


def trial_run(
    plan: Plan,
    policy: Policy,
    cost: CostModel | None = None,
    *,
    observers: Sequence[Observer] = (),
    recorder: Recorder | None = None,
    peers: Sequence[Rank] = (),
    most_steps: int = MOST_STEPS,
) -> TrialFigures:
    """Simulate the prefill and a few decode steps of a plan, and return the predicted figures.

    The plan cannot be run afterwards. Decode figures leave out the first decode step, which overlaps with the prefill,
    and the last one, which fetches nothing for a next step. If there are fewer than three, none is left out.

    Args:
        cost: the cost model; by default the measured costs of the plan's machine, or its roofline.
        recorder: records the run's tasks for a trace; None for no trace.
        peers: plans and policies of the other nodes, if several run one model.
        most_steps: the largest number of steps to run, the prefill included.
    """
    steps, age = steps_of(plan.batch, most_steps)
    spans, config = _Spans(), plan.layout.config
    virtual = VirtualRun(
        [Rank(plan, policy), *peers],
        cost=cost,
        decisions=simulated_decisions(plan, _TrialRouting(config.routed.experts, config.routed.top_k)),
        make_engine=Engine,
        observers=[spans, *observers],
        recorder=recorder,
        steps=steps,
        age=age,
    )
    virtual.run()
    run = virtual.rank_runs[0]
    generation, ends = run.generation, run.generation.step_ends
    window = whole_steps(ends)
    count = max(1, len(window) - 1)

    def busy(start: int, end: int) -> dict[str, float]:
        return {name: spans.share(lane, start, end) for name, lane in run.lanes.items()}

    in_prefill = busy(generation.loaded, ends[0])
    return TrialFigures(
        prefill_seconds=(ends[0] - generation.loaded) / 1e9,
        first_token_seconds=(fmean(generation.first_tokens.values()) - generation.loaded) / 1e9,
        step_seconds=(window[-1] - window[0]) / 1e9 / count,
        utilization=busy(window[0], window[-1]) if len(window) > 1 else in_prefill,
        prefill_utilization=in_prefill,
        prefill=(generation.loaded, ends[0]),
        decode=(window[0], window[-1]),
        steps=count,
        layers=len(plan.layers),
        tasks=spans.count,
    )


def steps_of(batch: Batch, most: int = MOST_STEPS) -> tuple[int, int]:
    """Return the number of steps of a trial run, the prefill included, and the number of decode steps that it skips.

    The skipped steps come right after the prefill. So the decode steps of the trial run are in the middle of the
    generation, where KV caches have their mean length.

    Args:
        most: the largest number of steps, the prefill included.
    """
    steps = min(most, batch.new_tokens)
    return steps, max(0, (batch.new_tokens - steps) // 2)


def whole_steps(ends: Sequence[int]) -> Sequence[int]:
    """Return the end times `ends` of steps; if there are more than three, without the first and the last one."""
    return ends[1:-1] if len(ends) > 3 else ends


class _Spans:
    """Observer that keeps the start and the end of each lane's tasks, in nanoseconds and in order."""

    def __init__(self) -> None:
        self._times: defaultdict[Lane, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))

    def ended(self, task: Task) -> None:
        starts, ends = self._times[task.lane]
        starts.append(task.start)
        ends.append(task.end)

    @property
    def count(self) -> int:
        """Number of tasks that ran."""
        return sum(len(ends) for _, ends in self._times.values())

    def share(self, lane: Lane, start: int, end: int) -> float:
        """Return the share, from 0 to 1, of an interval in which a lane was busy.

        Args:
            start, end: the interval, in nanoseconds.
        """
        starts, ends = self._times[lane]
        first, last = bisect_right(ends, start), bisect_left(starts, end)
        if first >= last:
            return 0.0
        outside = max(0, start - starts[first]) + max(0, ends[last - 1] - end)
        return (sum(ends[first:last]) - sum(starts[first:last]) - outside) / (end - start)


class _TrialRouting(SeededRouting):
    """Uniform random choices of experts, kept so that the trial runs of all policies get equal choices."""

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Return the number of tokens that choose each expert, by ascending expert; unchosen experts are left out."""
        return dict(_counts(self.experts, self.top_k, step, layer, micro_batch, tokens))


@lru_cache(maxsize=2048)
def _counts(experts: int, top_k: int, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
    if tokens < MANY_TOKENS:
        return SeededRouting(experts, top_k).choose(step, layer, micro_batch, tokens)
    draw = np.random.default_rng((step, layer, micro_batch))
    counts = draw.binomial(tokens, top_k / experts, experts)
    left = tokens * top_k - int(counts.sum())
    counts += left // experts
    counts[draw.permutation(experts)[: left % experts]] += 1
    return {expert: min(tokens, int(count)) for expert, count in enumerate(counts) if count > 0}
