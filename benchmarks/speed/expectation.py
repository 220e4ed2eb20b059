"""Cost of the expectation that `moesched run` prints where the machine is calibrated, beside the run that it is of.

After a run, its plan is made again and simulated: processor seconds from the end of the run to its report, less those
of the same run without an expectation. While it runs, its routers' choices are kept: tasks times the seconds of a tight
loop, without those of an empty loop. Medians count. A cost may be 2 % of the run's time, or a second if that is longer.
Runs of many short steps are the worst case, since a simulated task takes the same time whatever the model's size.
The machine has to be calibrated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, NamedTuple

import moesched
from benchmarks.record.benchmark import Benchmark
from benchmarks.record.claims import Claim, Result, all_of
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.routing.observed import ObservedRouting
from moesched.runs.listeners import Listener
from moesched.tasks import Kernel, Lane, Work

BAR_SHARE, BAR_SECONDS = 0.02, 1.0
LOOPS = 100_000
LARGE = SHAPES["mixtral-0.8b"]
SMALL = LARGE.varied(
    name="small",
    layers=4,
    hidden=64,
    intermediate=64,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocabulary=256,
    max_positions=32_768,
)


class Case(NamedTuple):
    """A run; `budget` is of the host's memory."""

    large: bool
    policy: str
    requests: int
    new_tokens: int
    budget: str | None = None


CASES = {
    "large model, resident": Case(True, "resident", 1, 64),
    "large model, streamed": Case(True, "cgopipe", 8, 8, "900MB"),
    "small model, resident, many steps": Case(False, "resident", 1, 10_000),
    "small model, streamed, many steps": Case(False, "expert_streaming", 4, 1500, "2MB"),
    "small model, previews, many steps": Case(False, "prefetch_gate", 4, 1500, "2MB"),
}


def claims(result: Result) -> Iterator[Claim]:
    """The cost of the expectation that `run` prints."""
    cases = result["cases"].values()
    words = "runs whose expectation takes at most 2 % of the run or 1 s"
    yield all_of(words, sum(case["reached"] for case in cases), len(cases))


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    packages=("torch",),
    claims=claims,
    parts=CASES,
    rounds=3,
)


class Ended(Listener):
    """Notes when a batch has run."""

    seconds = 0.0

    def ran(self) -> None:
        self.seconds = process_time()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the costs, write the result; 1 where one is above its bar."""
    options = BENCHMARK.parse(arguments)
    observing = observing_seconds()
    with TemporaryDirectory() as folder:
        models = {
            large: write_random_model(LARGE if large else SMALL, Path(folder) / str(large))
            for large in {CASES[name].large for name in options.only}
        }
        rows = {
            name: measured(models[CASES[name].large], CASES[name], options.rounds, observing)
            for name in options.only
        }
    return BENCHMARK.write({"observing_seconds": observing, "cases": rows})


def measured(model: Path, case: Case, rounds: int, observing: float) -> dict[str, Any]:
    """The cost of a case's expectation beside its run."""
    pairs = [(after(model, case, expect=False), after(model, case, expect=True)) for _ in range(rounds)]
    _, (_, report) = pairs[-1]
    if report.expected is None:
        raise SystemExit(f"nothing to measure: {report.no_expectation}")
    predicting = median(with_it - without for (without, _), (with_it, _) in pairs)
    seconds = max(0.0, predicting) + observing * report.tasks
    bar = max(BAR_SECONDS, BAR_SHARE * report.wall_seconds)
    return {
        "tasks": report.tasks,
        "simulated_tasks": report.expected.tasks,
        "run_seconds": report.wall_seconds,
        "predicting_seconds": predicting,
        "seconds": seconds,
        "bar_seconds": bar,
        "reached": seconds <= bar,
    }


def after(model: Path, case: Case, *, expect: bool) -> tuple[float, Any]:
    """Processor seconds between the end of a run and its report, and the report."""
    ended = Ended()
    report = moesched.run_model(
        model,
        [[1, 2, 3]] * case.requests,
        policy=case.policy,
        max_new_tokens=case.new_tokens,
        batch_size=case.requests,
        micro_batch_size=case.requests,
        budgets={} if case.budget is None else {"host": case.budget},
        listener=ended,
        expect=expect,
    )
    return process_time() - ended.seconds, report


def observing_seconds() -> float:
    """Seconds to observe a task, beyond those of calling a method that does nothing."""
    task = Kernel(Lane("accelerator"), Work("kernel", "cpu"), "run_expert")

    def timed(observer: Listener | ObservedRouting) -> float:
        start = perf_counter()
        for _ in repeat(None, LOOPS):
            observer.ended(task)
        return (perf_counter() - start) / LOOPS

    return max(0.0, median(timed(ObservedRouting(1)) - timed(Listener()) for _ in range(7)))


if __name__ == "__main__":
    sys.exit(main())
